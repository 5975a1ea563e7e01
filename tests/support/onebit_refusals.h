// How the tests of what 1-bit optimizers refuse judge it: one sentence, and nothing changed.
#pragma once

#include <string>
#include <vector>

#include "support/catch.h"

#include "support/onebit_ranks.h"

namespace pacer::testing {

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
