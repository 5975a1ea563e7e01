// How the tests of what 1-bit optimizers refuse judge it: one sentence, and nothing changed.
#pragma once

#include <string>
#include <vector>

#include "support/catch.h"

#include "support/optimizers/onebit_ranks.h"

namespace pacer::testing {

template <class Optimizer>
OptionsOf<Optimizer> frozen_at_two() {
  return OptionsOf<Optimizer>(0.01).freeze_step(2).compress_vectors(true);
}

// Of an optimizer with one parameter of four elements.
template <class Optimizer>
std::string refusal_of(const OptionsOf<Optimizer>& options, at::ScalarType dtype = at::kFloat) {
  return refusal([&] { Optimizer({at::ones({4}, dtype).requires_grad_()}, options); });
}

// One group that is compressed and one that is not.
template <class Options>
std::vector<OneBitGroup<Options>> small_groups(const Options& options, int64_t elements = 300) {
  return {{{{elements}, {7}}, options}, {{{5}}, Options(options).compress(false)}};
}

// "" if the message is one sentence with these parts.
inline std::string unless_sentence(const std::string& message, const std::vector<std::string>& parts) {
  if (message.empty() || message[0] == '<') return "not refused: " + message;
  if (contains(message, "\n") || contains(message, ". ")) return "more than a sentence: " + message;
  for (const std::string& part : parts) {
    if (!contains(message, part)) return "no '" + part + "' in: " + message;
  }
  return "";
}

// The same, and the optimizer is as it was.
template <class OneBit, class Action>
std::string unless_refused_whole(OneBit& ranks, size_t rank, const std::vector<std::string>& parts,
                                 const Action& action) {
  const auto state = cloned_state(ranks.optimizers[rank]->export_state());
  const auto errors = cloned_state(ranks.optimizers[rank]->export_rank_state());
  const auto values = clones(ranks.parameters[rank]);
  const std::string wrong = unless_sentence(refusal(action), parts);
  if (!wrong.empty()) return wrong;
  if (!same_bits(values, ranks.parameters[rank])) return "a parameter changed";
  const std::string name = differing_name(state, ranks.optimizers[rank]->export_state());
  return name + differing_name(errors, ranks.optimizers[rank]->export_rank_state());
}

// "" if two groups with these options are refused, from the start and later.
template <class Optimizer>
std::string unless_groups_must_agree(const OptionsOf<Optimizer>& base, const OptionsOf<Optimizer>& other) {
  using Groups = GroupsOf<Optimizer>;
  const std::vector<std::string> parts = {Family<Optimizer>::kName, "group 1 and group 0 differ"};
  const std::string at_once =
      unless_sentence(refusal([&] {
                        OneBitRanks<Optimizer>(1, Groups{{{{4}}, base}, {{{3}}, other}});
                      }),
                      parts);
  if (!at_once.empty()) return at_once;
  OneBitRanks<Optimizer> ranks(1, Groups{{{{4}}, base}});
  torch::optim::OptimizerParamGroup late({at::ones({2}).requires_grad_()},
                                         std::make_unique<OptionsOf<Optimizer>>(other));
  const std::string later = unless_refused_whole(ranks, 0, {"group 1 and group 0 differ"},
                                                 [&] { ranks.optimizers[0]->add_param_group(late); });
  if (!later.empty()) return later;
  return ranks.optimizers[0]->param_groups().size() == 1 ? "" : "the group was added";
}

template <class OneBit>
void take_steps(OneBit& ranks, int64_t first, int64_t end) {
  for (int64_t t = first; t < end; ++t) REQUIRE(ranks.step(ranks.gradients(t)) == "");
}

// Everything that a step may change, of all ranks, but the number of attempts.
template <class OneBit>
std::vector<NamedTensors> everything(const OneBit& ranks) {
  std::vector<NamedTensors> all;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    NamedTensors& state = all.emplace_back(cloned_state(ranks.optimizers[rank]->export_state()));
    state.erase("onebit/attempts");
    for (const auto& [name, tensor] : cloned_state(ranks.optimizers[rank]->export_rank_state()))
      state[name] = tensor;
    for (size_t i = 0; i < ranks.parameters[rank].size(); ++i) {
      state["value " + std::to_string(i)] = ranks.parameters[rank][i].detach().clone();
    }
  }
  return all;
}
inline std::string first_change(const std::vector<NamedTensors>& before,
                                const std::vector<NamedTensors>& after) {
  for (size_t rank = 0; rank < before.size(); ++rank) {
    const std::string name = differing_name(before[rank], after[rank]);
    if (!name.empty()) return name + " of rank " + std::to_string(rank);
  }
  return "";
}

}  // namespace pacer::testing
