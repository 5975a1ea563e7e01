// How the tests of OneBitAdam's refusals judge them: one sentence, and nothing changed.
#pragma once

#include <string>
#include <vector>

#include "support/catch.h"

#include "support/onebit_adam_ranks.h"

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
template <class Action>
std::string unless_refused_whole(OneBitAdamRanks& ranks, size_t rank, const std::vector<std::string>& parts,
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

inline OneBitAdamOptions frozen_at_two() { return OneBitAdamOptions(0.01).freeze_step(2); }

inline std::vector<OneBitAdamGroup> small_groups(const OneBitAdamOptions& options, int64_t elements = 300) {
  return {{{{elements}, {7}}, options}, {{{5}}, OneBitAdamOptions(options).compress(false)}};
}

inline void take_steps(OneBitAdamRanks& ranks, int64_t first, int64_t end) {
  for (int64_t t = first; t < end; ++t) REQUIRE(ranks.step(ranks.gradients(t)) == "");
}

}  // namespace pacer::testing
