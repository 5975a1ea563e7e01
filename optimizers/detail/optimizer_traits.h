// What tells the optimizers from each other: names, option and state types, and what their options mean to
// the kernels. Everything else is shared, so the engine asks this small table instead of being a template.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include <pacer/collectives/compressed_all_reduce.h>
#include <pacer/kernels/math/adam.h>
#include <pacer/kernels/math/onebit_lamb.h>
#include <pacer/optimizers/adam_options.h>
#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// Validated options of one parameter group.
struct AdamGroupSettings {
  kernels::AdamSettings kernel;
  bool amsgrad = false;
  bool finite_check = false;
  bool compress = false;  // 1-bit optimizers: the group's momentum travels as signs once the variance froze
  bool averages_trust = false;  // states have a trust_average
  MasterWeights master_weights = MasterWeights::automatic;
  Rounding rounding = Rounding::nearest;
  kernels::LambFactorBounds factor_bounds;  // OneBitLamb only
};

// What a 1-bit optimizer asks for beside its rule, the same in all groups.
struct OneBitChoices {
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

  CompressionOptions compression() const;
};

struct OptimizerTraits {
  const char* name;
  bool is_onebit;
  // True for options of this optimizer's own type.
  bool (*owns)(const torch::optim::OptimizerOptions& options);
  // A copy of the options as this optimizer's own type. Where they are the torch optimizer's, what these lack
  // is as in `own`. Null if they are neither.
  std::unique_ptr<torch::optim::OptimizerOptions> (*adopt)(const torch::optim::OptimizerOptions& options,
                                                           const torch::optim::OptimizerOptions& own);
  // Options of this optimizer's own type, checked: throws InvalidArgument naming option, value and range.
  AdamGroupSettings (*settings)(const torch::optim::OptimizerOptions& options);
  // Of a 1-bit optimizer's options.
  OneBitChoices (*choices)(const torch::optim::OptimizerOptions& options);
  std::unique_ptr<torch::optim::OptimizerParamState> (*make_state)();
  // Options of this optimizer's own type as named numbers, each name behind `prefix`, and back, from a state
  // of that version; reading throws InvalidArgument naming what is missing, and adds the names it read to
  // `used`.
  void (*export_options)(const torch::optim::OptimizerOptions& options, const std::string& prefix,
                         NamedTensors& state);
  std::unique_ptr<torch::optim::OptimizerOptions> (*import_options)(const std::string& prefix,
                                                                    const NamedTensors& state,
                                                                    int64_t version,
                                                                    std::set<std::string>& used);
  // Equal in every field but the learning rates.
  bool (*alike)(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b);
  // The rate a schedule multiplies, in options of this optimizer's own type.
  double (*base_lr)(torch::optim::OptimizerOptions& options);
  void (*set_base_lr)(torch::optim::OptimizerOptions& options, double rate);
};

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
using ParamStates = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

// Of all groups. Throws InvalidArgument where they differ in what must be the same in all.
std::vector<AdamGroupSettings> settings_of(const OptimizerTraits& traits, const ParamGroups& groups);

extern const OptimizerTraits kAdamTraits;
extern const OptimizerTraits kAdamWTraits;
extern const OptimizerTraits kLambTraits;
extern const OptimizerTraits kOneBitAdamTraits;
extern const OptimizerTraits kOneBitLambTraits;

}  // namespace pacer::detail
