// OneBitLamb as the engines see it.
#include <cmath>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/onebit_flavour_parts.h>
#include <pacer/optimizers/onebit_lamb_options.h>

namespace pacer::detail {
namespace {

constexpr const char* kOneBitLamb = "OneBitLamb";

AdamGroupSettings onebit_lamb_settings(const torch::optim::OptimizerOptions& base) {
  const auto& options = static_cast<const OneBitLambOptions&>(base);
  AdamGroupSettings settings = onebit_settings(kOneBitLamb, options);
  check_coefficients(kOneBitLamb, options);
  require(options.coeff_beta() >= 0 && options.coeff_beta() < 1, kOneBitLamb,
          ": coeff_beta must be in [0, 1), not ", options.coeff_beta());
  require(options.factor_min() > 0 && std::isfinite(options.factor_min()), kOneBitLamb,
          ": factor_min must be a finite number > 0, not ", options.factor_min());
  require(std::isfinite(options.factor_max()) && options.factor_max() >= options.factor_min(), kOneBitLamb,
          ": factor_max must be a finite number >= factor_min (", options.factor_min(), "), not ",
          options.factor_max());
  require(options.factor_threshold() >= 0 && options.factor_threshold() < 1, kOneBitLamb,
          ": factor_threshold must be in [0, 1), not ", options.factor_threshold());
  set_coefficients(options, settings.kernel);
  settings.kernel.coeff_beta = options.coeff_beta();
  settings.averages_trust = options.compress();
  settings.factor_bounds = {options.factor_min(), options.factor_max(), options.factor_threshold()};
  return settings;
}

std::unique_ptr<torch::optim::OptimizerOptions> adopt_onebit_lamb(
    const torch::optim::OptimizerOptions& options) {
  return owns<OneBitLambOptions>(options) ? options.clone() : nullptr;
}

void export_onebit_lamb_options(const torch::optim::OptimizerOptions& base, const std::string& prefix,
                                NamedTensors& state) {
  const auto& options = static_cast<const OneBitLambOptions&>(base);
  export_rule(options, prefix, state);
  export_choices(options, prefix, state);
  const auto put = [&](const char* name, auto value) { state[prefix + name] = number_tensor(value); };
  put("min_coeff", options.min_coeff());
  put("max_coeff", options.max_coeff());
  put("coeff_beta", options.coeff_beta());
  put("factor_min", options.factor_min());
  put("factor_max", options.factor_max());
  put("factor_threshold", options.factor_threshold());
  put("adapt", options.adapt());
}

std::unique_ptr<torch::optim::OptimizerOptions> import_onebit_lamb_options(const std::string& prefix,
                                                                           const NamedTensors& state) {
  auto options = import_rule<OneBitLambOptions>(prefix, state);
  import_choices(prefix, state, *options);
  const auto real = [&](const char* name) { return require_number<double>(state, prefix + name); };
  options->min_coeff(real("min_coeff")).max_coeff(real("max_coeff")).coeff_beta(real("coeff_beta"));
  options->factor_min(real("factor_min")).factor_max(real("factor_max"));
  options->factor_threshold(real("factor_threshold"));
  options->adapt(require_number<bool>(state, prefix + "adapt"));
  return options;
}

}  // namespace

const AdamFlavour kOneBitLambFlavour = {kOneBitLamb,
                                        owns<OneBitLambOptions>,
                                        adopt_onebit_lamb,
                                        onebit_lamb_settings,
                                        make_state<OneBitLambParamState>,
                                        export_onebit_lamb_options,
                                        import_onebit_lamb_options,
                                        base_lr<OneBitLambOptions>};

}  // namespace pacer::detail
