// The parts of an AdamFlavour that are the same for all optimizers, as templates over their option types.
// What only some of them have is added in adam_flavour.cpp and lamb_flavour.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/adam_flavour.h>

namespace pacer::detail {

inline void check_at_least_zero(const char* optimizer, const char* option, double value) {
  require(std::isfinite(value) && value >= 0, optimizer, ": ", option, " must be a finite number >= 0, not ",
          value);
}

inline void check_beta(const char* optimizer, const char* option, double value) {
  require(value >= 0 && value < 1, optimizer, ": ", option, " must be in [0, 1), not ", value);
}

// What every Adam has: the rates, betas, epsilon and decay.
template <class Options>
void check_rule_options(const char* optimizer, const Options& options) {
  check_at_least_zero(optimizer, "lr", options.lr());
  check_at_least_zero(optimizer, "initial_lr", options.initial_lr().value_or(0));
  check_beta(optimizer, "the first beta", std::get<0>(options.betas()));
  check_beta(optimizer, "the second beta", std::get<1>(options.betas()));
  check_at_least_zero(optimizer, "eps", options.eps());
  check_at_least_zero(optimizer, "weight_decay", options.weight_decay());
}

template <class Options>
void set_rule(const Options& options, kernels::AdamSettings& kernel) {
  kernel.learning_rate = options.lr();
  kernel.beta1 = std::get<0>(options.betas());
  kernel.beta2 = std::get<1>(options.betas());
  kernel.epsilon = options.eps();
  kernel.weight_decay = options.weight_decay();
  kernel.bias_correction = options.bias_correction();
}

template <class Options>
AdamGroupSettings common_settings(const char* optimizer, const Options& options) {
  check_rule_options(optimizer, options);
  require(options.rounding() == Rounding::nearest || options.master_weights() == MasterWeights::none,
          optimizer,
          ": stochastic rounding is for bf16 parameters without master weights; set "
          "master_weights(MasterWeights::none) as well, or leave rounding at nearest");
  AdamGroupSettings settings;
  set_rule(options, settings.kernel);
  settings.kernel.seed = options.seed();
  settings.finite_check = options.finite_check();
  settings.master_weights = options.master_weights();
  settings.rounding = options.rounding();
  return settings;
}

// LAMB's trust ratio.
template <class Options>
void check_coefficients(const char* optimizer, const Options& options) {
  check_at_least_zero(optimizer, "min_coeff", options.min_coeff());
  require(std::isfinite(options.max_coeff()) && options.max_coeff() >= options.min_coeff(), optimizer,
          ": max_coeff must be a finite number >= min_coeff (", options.min_coeff(), "), not ",
          options.max_coeff());
}
template <class Options>
void set_coefficients(const Options& options, kernels::AdamSettings& kernel) {
  kernel.rule = kernels::UpdateRule::lamb;
  kernel.min_coeff = options.min_coeff();
  kernel.max_coeff = options.max_coeff();
  kernel.adapt = options.adapt();
}

template <class Options>
void export_rule(const Options& options, const std::string& prefix, NamedTensors& state) {
  const auto put = [&](const char* name, auto value) { state[prefix + name] = number_tensor(value); };
  put("lr", options.lr());
  put("has_initial_lr", options.initial_lr().has_value());
  if (options.initial_lr()) put("initial_lr", *options.initial_lr());
  put("beta1", std::get<0>(options.betas()));
  put("beta2", std::get<1>(options.betas()));
  put("eps", options.eps());
  put("weight_decay", options.weight_decay());
  put("bias_correction", options.bias_correction());
  put("master_weights", static_cast<int64_t>(options.master_weights()));
}

// An enumerator whose last one is `last`.
template <class Choice>
Choice import_choice(const std::string& name, Choice last, const NamedTensors& state) {
  const auto value = require_number<int64_t>(state, name);
  require(value >= 0 && value <= static_cast<int64_t>(last), "\"", name,
          "\" of the state to load has the unknown value ", value);
  return static_cast<Choice>(value);
}

template <class Options>
std::unique_ptr<Options> import_rule(const std::string& prefix, const NamedTensors& state) {
  const auto real = [&](const char* name) { return require_number<double>(state, prefix + name); };
  const auto flag = [&](const char* name) { return require_number<bool>(state, prefix + name); };
  auto options = std::make_unique<Options>(real("lr"));
  if (flag("has_initial_lr")) options->initial_lr(real("initial_lr"));
  options->betas({real("beta1"), real("beta2")}).eps(real("eps")).weight_decay(real("weight_decay"));
  options->bias_correction(flag("bias_correction"));
  options->master_weights(import_choice(prefix + "master_weights", MasterWeights::none, state));
  return options;
}

template <class Options>
void export_common(const Options& options, const std::string& prefix, NamedTensors& state) {
  export_rule(options, prefix, state);
  const auto put = [&](const char* name, auto value) { state[prefix + name] = number_tensor(value); };
  put("finite_check", options.finite_check());
  put("rounding", static_cast<int64_t>(options.rounding()));
  put("seed", static_cast<int64_t>(options.seed()));
}

template <class Options>
std::unique_ptr<Options> import_common(const std::string& prefix, const NamedTensors& state) {
  auto options = import_rule<Options>(prefix, state);
  options->finite_check(require_number<bool>(state, prefix + "finite_check"));
  options->rounding(import_choice(prefix + "rounding", Rounding::stochastic, state));
  options->seed(static_cast<uint64_t>(require_number<int64_t>(state, prefix + "seed")));
  return options;
}

template <class Options>
double base_lr(torch::optim::OptimizerOptions& base) {
  auto& options = static_cast<Options&>(base);
  if (!options.initial_lr()) options.initial_lr(options.lr());
  return *options.initial_lr();
}

template <class Options>
bool owns(const torch::optim::OptimizerOptions& options) {
  return dynamic_cast<const Options*>(&options) != nullptr;
}

template <class State>
std::unique_ptr<torch::optim::OptimizerParamState> make_state() {
  return std::make_unique<State>();
}

}  // namespace pacer::detail
