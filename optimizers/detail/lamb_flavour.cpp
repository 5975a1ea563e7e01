// FusedLamb as the engine sees it: Adam's moments under another rule.
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/adam_flavour.h>
#include <pacer/optimizers/detail/flavour_parts.h>
#include <pacer/optimizers/lamb_options.h>

namespace pacer::detail {
namespace {

constexpr const char* kName = "FusedLamb";

AdamGroupSettings lamb_settings(const torch::optim::OptimizerOptions& base) {
  const auto& options = static_cast<const FusedLambOptions&>(base);
  AdamGroupSettings settings = common_settings(kName, options);
  check_coefficients(kName, options);
  set_coefficients(options, settings.kernel);
  return settings;
}

std::unique_ptr<torch::optim::OptimizerOptions> adopt_own(const torch::optim::OptimizerOptions& options) {
  return owns<FusedLambOptions>(options) ? options.clone() : nullptr;
}

void export_lamb_options(const torch::optim::OptimizerOptions& base, const std::string& prefix,
                         NamedTensors& state) {
  const auto& options = static_cast<const FusedLambOptions&>(base);
  export_common(options, prefix, state);
  state[prefix + "min_coeff"] = number_tensor(options.min_coeff());
  state[prefix + "max_coeff"] = number_tensor(options.max_coeff());
  state[prefix + "adapt"] = number_tensor(options.adapt());
}

std::unique_ptr<torch::optim::OptimizerOptions> import_lamb_options(const std::string& prefix,
                                                                    const NamedTensors& state) {
  auto options = import_common<FusedLambOptions>(prefix, state);
  options->min_coeff(require_number<double>(state, prefix + "min_coeff"));
  options->max_coeff(require_number<double>(state, prefix + "max_coeff"));
  options->adapt(require_number<bool>(state, prefix + "adapt"));
  return options;
}

}  // namespace

const AdamFlavour kLambFlavour = {kName,
                                  owns<FusedLambOptions>,
                                  adopt_own,
                                  lamb_settings,
                                  make_state<FusedLambParamState>,
                                  export_lamb_options,
                                  import_lamb_options,
                                  base_lr<FusedLambOptions>};

}  // namespace pacer::detail
