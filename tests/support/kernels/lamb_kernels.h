// One LAMB step of one tensor on the CPU by the kernels, for tests of the kernels alone.
#pragma once

#include <cstdint>
#include <vector>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/kernels/lamb.h>

#include "support/kernels/adam_arrays.h"

namespace pacer::kernels::testing {

// Scalars of any number of step groups, as the kernels expect them.
class LambGroupScalars {
 public:
  explicit LambGroupScalars(int64_t count = 1) : groups_(static_cast<size_t>(count)) {}

  void set(int64_t group, AdamStorage storage, RuleSettings settings, int64_t step, bool skip = false) {
    settings.rule = UpdateRule::lamb;
    adam_scalars_cpu({settings, storage == AdamStorage::f64, !skip}, step,
                     groups_[static_cast<size_t>(group)]);
  }
  const StepScalars* data() const { return groups_.data(); }
  const std::vector<StepScalars>& all() const { return groups_; }

 private:
  std::vector<StepScalars> groups_;
};

inline RuleSettings lamb_settings_with(double weight_decay = 0.1) {
  RuleSettings settings;
  settings.learning_rate = 0.02;
  settings.weight_decay = weight_decay;
  settings.epsilon = 1e-6;
  settings.factor = 0.75;
  settings.seed = 0x123456789ABCDEF0u;
  return settings;
}

// The sums and the ratio of a step; `tile_elements` cuts the second pass.
struct LambOutcome {
  std::vector<double> parameter_sums, update_sums;  // by unit
  LambRatio ratio{-1, -1};
};

inline LambOutcome lamb_step_on_cpu(AdamStorage storage, const AdamTensor& tensor, const void* gradient_data,
                                    int64_t count, const StepScalars* scalars,
                                    int64_t tile_elements = int64_t{1} << 30,
                                    const LambLoops& loops = kLambLoops) {
  const AdamGradient gradient{gradient_data, 0};
  const std::vector<Tile> units = make_tiles({count}, kReductionUnit);
  LambOutcome outcome;
  outcome.parameter_sums.assign(units.size(), -1);
  outcome.update_sums.assign(units.size(), -1);
  for (size_t i = 0; i < units.size(); ++i) {
    loops.moments_cpu(storage, units[i], &tensor, &gradient, scalars, &outcome.parameter_sums[i],
                      &outcome.update_sums[i]);
  }
  lamb_ratio_cpu(storage, {0, static_cast<int64_t>(units.size())}, gradient, scalars,
                 {outcome.parameter_sums.data(), outcome.update_sums.data()}, &outcome.ratio);
  for (const Tile& tile : make_tiles({count}, tile_elements)) {
    loops.update_cpu(storage, tile, &tensor, &gradient, scalars, &outcome.ratio);
  }
  return outcome;
}

inline LambOutcome lamb_step_on_cpu(AdamArrays& arrays, const RuleSettings& settings, int64_t step,
                                    int64_t tile_elements = int64_t{1} << 30, int64_t first_element = 0) {
  LambGroupScalars scalars;
  scalars.set(0, arrays.storage(), settings, step);
  return lamb_step_on_cpu(arrays.storage(), arrays.tensor(first_element), arrays.data(kGradient),
                          arrays.count(), scalars.data(), tile_elements);
}

}  // namespace pacer::kernels::testing
