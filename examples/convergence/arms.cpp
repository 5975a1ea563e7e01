// The registry of arms. To add one: write its line in arms(), with a function that makes its optimizer.
#include "arms.h"

#include <torch/optim/adamw.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/fused_adam.h>

namespace convergence {
namespace {

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kEpsilon = 1e-8;

// For every optimizer with the options of AdamW: one group with decay, one without.
template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make_adamw(const OptimizerRecipe& recipe) {
  const auto options = Options(recipe.learning_rate).betas({kBeta1, kBeta2}).eps(kEpsilon);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(recipe.decayed,
                      std::make_unique<Options>(Options(options).weight_decay(recipe.weight_decay)));
  groups.emplace_back(recipe.undecayed, std::make_unique<Options>(Options(options).weight_decay(0.0)));
  return std::make_unique<Optimizer>(groups, options);
}

}  // namespace

const std::vector<Arm>& arms() {
  static const std::vector<Arm> registered = {
      {"adamw", "torch::optim::AdamW, LibTorch's own loop over parameters",
       make_adamw<torch::optim::AdamW, torch::optim::AdamWOptions>},
      {"fused-adamw", "pacer::FusedAdamW, all parameters in one pass over memory",
       make_adamw<pacer::FusedAdamW, pacer::FusedAdamWOptions>},
  };
  return registered;
}

const Arm& find_arm(const std::string& name) {
  for (const Arm& arm : arms()) {
    if (arm.name == name) return arm;
  }
  throw pacer::InvalidArgument("there is no arm '" + name + "'");
}

}  // namespace convergence
