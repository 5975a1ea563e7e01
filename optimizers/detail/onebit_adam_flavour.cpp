// OneBitAdam as the engines see it.
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/onebit_flavour_parts.h>
#include <pacer/optimizers/onebit_adam_options.h>

namespace pacer::detail {
namespace {

constexpr const char* kOneBitAdam = "OneBitAdam";

AdamGroupSettings onebit_adam_settings(const torch::optim::OptimizerOptions& base) {
  const auto& options = static_cast<const OneBitAdamOptions&>(base);
  AdamGroupSettings settings = onebit_settings(kOneBitAdam, options);
  settings.kernel.decay_mode =
      options.weight_decay() == 0 ? kernels::WeightDecay::none : kernels::WeightDecay::decoupled;
  return settings;
}

std::unique_ptr<torch::optim::OptimizerOptions> adopt_onebit_adam(
    const torch::optim::OptimizerOptions& options) {
  require(!owns<FusedAdamOptions>(options), kOneBitAdam,
          ": FusedAdamOptions add weight decay to the gradient (L2), which a momentum of signs cannot carry; "
          "use OneBitAdamOptions, whose decay is decoupled");
  return owns<OneBitAdamOptions>(options) ? options.clone() : nullptr;
}

void export_onebit_adam_options(const torch::optim::OptimizerOptions& base, const std::string& prefix,
                                NamedTensors& state) {
  const auto& options = static_cast<const OneBitAdamOptions&>(base);
  export_rule(options, prefix, state);
  export_choices(options, prefix, state);
  state[prefix + "refresh_variance_every"] = number_tensor(options.refresh_variance_every());
}

std::unique_ptr<torch::optim::OptimizerOptions> import_onebit_adam_options(const std::string& prefix,
                                                                           const NamedTensors& state) {
  auto options = import_rule<OneBitAdamOptions>(prefix, state);
  import_choices(prefix, state, *options);
  options->refresh_variance_every(require_number<int64_t>(state, prefix + "refresh_variance_every"));
  return options;
}

}  // namespace

const AdamFlavour kOneBitAdamFlavour = {kOneBitAdam,
                                        owns<OneBitAdamOptions>,
                                        adopt_onebit_adam,
                                        onebit_adam_settings,
                                        make_state<OneBitAdamParamState>,
                                        export_onebit_adam_options,
                                        import_onebit_adam_options,
                                        base_lr<OneBitAdamOptions>};

}  // namespace pacer::detail
