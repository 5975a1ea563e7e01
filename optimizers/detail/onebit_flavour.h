// OneBitAdam's options as the engines see them.
#pragma once

#include <optional>
#include <vector>

#include <pacer/collectives/compressed_all_reduce.h>
#include <pacer/optimizers/detail/adam_flavour.h>
#include <pacer/optimizers/onebit_adam_options.h>

namespace pacer::detail {

extern const AdamFlavour kOneBitAdamFlavour;

// What is the same in all groups.
struct OneBitPlan {
  std::optional<int64_t> freeze_step;
  std::optional<int64_t> freeze_automatically;
  bool allow_early_freeze = false;
  int64_t refresh_variance_every = 0;
  double variance_floor = 0;
  bool compress_alone = false;
  bool one_bit = true;
  CompressionOptions compression;
  std::vector<bool> compressed;  // by group

  // What must stay as it was once the variance is frozen.
  bool exchanges_like(const OneBitPlan& other) const;
};

// Checked; throws InvalidArgument where groups differ.
OneBitPlan onebit_plan(const std::vector<torch::optim::OptimizerParamGroup>& groups);

inline bool is_compressed(const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const OneBitAdamOptions&>(group.options()).compress();
}

}  // namespace pacer::detail
