// Options of the 1-bit optimizers as the engines see them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <pacer/collectives/compressed_all_reduce.h>
#include <pacer/optimizers/detail/adam_flavour.h>

namespace pacer::detail {

extern const AdamFlavour kOneBitAdamFlavour;
extern const AdamFlavour kOneBitLambFlavour;

// What they ask for beside their rule; all but `compress` is the same in all groups.
struct OneBitChoices {
  bool compress = true;
  std::optional<int64_t> freeze_step;
  std::optional<int64_t> freeze_automatically;
  bool allow_early_freeze = false;
  int64_t refresh_variance_every = 0;
  double variance_floor = 0;
  kernels::ScaleNorm scale = kernels::ScaleNorm::rms;
  bool block_scales = false;
  bool compress_alone = false;
  bool hierarchical = false;
  bool one_bit = true;
};

// Of OneBitAdamOptions or OneBitLambOptions.
OneBitChoices onebit_choices(const torch::optim::OptimizerOptions& options);

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
OneBitPlan onebit_plan(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups);

inline bool is_compressed(const torch::optim::OptimizerParamGroup& group) {
  return onebit_choices(group.options()).compress;
}

}  // namespace pacer::detail
