// Every edit of lifecycle_edits.h, to every registered optimizer, in both phases, dtypes and memory orders:
// what each cell of that table came to. The only outcomes are equality with an fp64 restatement that does the
// same, and refusal in one sentence with nothing changed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "support/optimizers/lifecycle_edits.h"

namespace pacer::testing {

struct LifecycleCount {
  int equal = 0;
  int refused = 0;  // of which so many optimizers cannot be made at all:
  int impossible = 0;
  std::vector<std::string> wrong;  // cells that are neither
};

inline std::string first_lines(const std::vector<std::string>& all) {
  std::string text;
  for (size_t i = 0; i < all.size() && i < 40; ++i) text += all[i] + "\n";
  return text;
}

// One cell: steps, the edit, more steps. "": equal; a sentence: refused; "<...>": neither.
inline std::string lifecycle_outcome(Lifecycle& run, const LifecycleEdit& edit, int steps_before) {
  run.step(steps_before);
  if (run.apart() > 0.05)
    return "<apart before the edit by " + std::to_string(run.apart()) + " learning rates>";
  std::vector<Tensor> before = run.everything();
  const auto refused = [&](const std::string& sentence) {
    if (contains(sentence, "\n")) return "<more than a sentence> " + sentence;
    return same_bits(before, run.everything()) ? sentence : "<changed> " + sentence;
  };
  try {
    edit.apply(run);
    before = run.everything();
    run.step(1);
  } catch (const InvalidArgument& error) {
    return refused(error.what());
  } catch (const std::exception& error) {
    return std::string("<another exception> ") + error.what();
  }
  run.step(2);
  if (edit.undo) edit.undo(run);
  run.step(3);
  if (run.apart() > 0.05) return "<apart by " + std::to_string(run.apart()) + " learning rates>";
  return "";
}

// `by_turns`: each edit of each optimizer in each dtype is made in the first memory order and in one of the others,
// which the next edit, dtype and optimizer change, so that over three dtypes it has met them all.
inline LifecycleCount run_lifecycles(at::Device device, const std::vector<at::ScalarType>& dtypes,
                                     const std::vector<Layout>& layouts = kAllLayouts,
                                     bool by_turns = false) {
  LifecycleCount count;
  const std::vector<LifecycleEdit> edits = all_lifecycle_edits();
  size_t turn = 0;
  for (const RegisteredOptimizer& entry : all_optimizers()) {
    if (!entry.is_own) continue;
    ++turn;
    for (const at::ScalarType dtype : dtypes) {
      ++turn;
      for (size_t l = 0; l < layouts.size(); ++l) {
        const Layout layout = layouts[l];
        std::optional<bool> is_onebit;
        for (size_t e = 0; e < edits.size(); ++e) {
          if (by_turns && l > 0 && 1 + (turn + e) % (layouts.size() - 1) != l) continue;
          const LifecycleEdit& edit = edits[e];
          for (const bool frozen : {false, true}) {
            if (frozen && is_onebit == false) continue;
            const std::string cell = entry.name + ", " + c10::toString(dtype) + ", layout " +
                                     std::to_string(static_cast<int>(layout)) + ", " + edit.name +
                                     (frozen ? ", frozen" : "");
            std::string outcome;
            try {
              Lifecycle run(entry, dtype, layout, device);
              is_onebit = run.is_onebit();
              outcome = lifecycle_outcome(run, edit, frozen ? 4 : 1);
              if (outcome.empty() && edit.is_only_time) {
                Lifecycle unbroken(entry, dtype, layout, device);
                unbroken.step((frozen ? 4 : 1) + 6);
                if (!same_bits(run.everything(), unbroken.everything())) outcome = "<other bits>";
              }
            } catch (const InvalidArgument& error) {
              outcome = error.what();  // such an optimizer cannot be made
              ++count.impossible;
            }
            if (outcome.empty()) {
              ++count.equal;
            } else if (outcome[0] != '<') {
              ++count.refused;
            } else {
              count.wrong.push_back(cell + ": " + outcome);
            }
          }
        }
      }
    }
  }
  return count;
}

}  // namespace pacer::testing
