// What tells the optimizers from each other: names, option and state types, and what
// their options mean to the kernels. Everything else is shared, so the engine asks this small table instead
// of being a template.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

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
  bool averages_trust = false;  // states have a trust_average
  MasterWeights master_weights = MasterWeights::automatic;
  Rounding rounding = Rounding::nearest;
  kernels::LambFactorBounds factor_bounds;  // OneBitLamb only
};

struct AdamFlavour {
  const char* name;
  // True for options of this optimizer's own type.
  bool (*owns)(const torch::optim::OptimizerOptions& options);
  // A copy of the options as this optimizer's own type, converted if they are the torch optimizer's; null if
  // they are neither.
  std::unique_ptr<torch::optim::OptimizerOptions> (*adopt)(const torch::optim::OptimizerOptions& options);
  // Options of this optimizer's own type, checked: throws InvalidArgument naming option, value and range.
  AdamGroupSettings (*settings)(const torch::optim::OptimizerOptions& options);
  std::unique_ptr<torch::optim::OptimizerParamState> (*make_state)();
  // Options of this optimizer's own type as named numbers, each name behind `prefix`, and back; reading
  // throws InvalidArgument naming what is missing.
  void (*export_options)(const torch::optim::OptimizerOptions& options, const std::string& prefix,
                         NamedTensors& state);
  std::unique_ptr<torch::optim::OptimizerOptions> (*import_options)(const std::string& prefix,
                                                                    const NamedTensors& state);
  // The rate a schedule multiplies, in options of this optimizer's own type.
  double (*base_lr)(torch::optim::OptimizerOptions& options);
};

// Throws InvalidArgument where the groups of an optimizer differ in what must be the same in all.
void check_alike(const std::vector<AdamGroupSettings>& settings, const char* optimizer);

extern const AdamFlavour kAdamFlavour;
extern const AdamFlavour kAdamWFlavour;
extern const AdamFlavour kLambFlavour;

}  // namespace pacer::detail
