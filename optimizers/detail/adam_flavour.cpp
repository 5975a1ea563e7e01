#include <pacer/optimizers/detail/adam_flavour.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/flavour_parts.h>

namespace pacer::detail {
namespace {

template <class Options>
AdamGroupSettings adam_settings(const char* optimizer, const torch::optim::OptimizerOptions& base,
                                kernels::WeightDecay decay_mode) {
  const auto& options = static_cast<const Options&>(base);
  AdamGroupSettings settings = common_settings(optimizer, options);
  settings.kernel.decay_mode = options.weight_decay() == 0 ? kernels::WeightDecay::none : decay_mode;
  settings.amsgrad = options.amsgrad();
  return settings;
}

template <class Options, class TorchOptions>
std::unique_ptr<torch::optim::OptimizerOptions> adopt(const torch::optim::OptimizerOptions& options) {
  if (const auto* own = dynamic_cast<const Options*>(&options)) return std::make_unique<Options>(*own);
  if (const auto* other = dynamic_cast<const TorchOptions*>(&options))
    return std::make_unique<Options>(*other);
  return nullptr;
}

template <class Options>
void export_options(const torch::optim::OptimizerOptions& base, const std::string& prefix,
                    NamedTensors& state) {
  const auto& options = static_cast<const Options&>(base);
  export_common(options, prefix, state);
  state[prefix + "amsgrad"] = number_tensor(options.amsgrad());
}

template <class Options>
std::unique_ptr<torch::optim::OptimizerOptions> import_options(const std::string& prefix,
                                                               const NamedTensors& state) {
  auto options = import_common<Options>(prefix, state);
  options->amsgrad(require_number<bool>(state, prefix + "amsgrad"));
  return options;
}

}  // namespace

void check_alike(const std::vector<AdamGroupSettings>& settings, const char* optimizer) {
  for (size_t g = 1; g < settings.size(); ++g) {
    require(settings[g].finite_check == settings[0].finite_check, optimizer, ": finite_check is ",
            settings[0].finite_check ? "on" : "off", " in group 0 and ",
            settings[g].finite_check ? "on" : "off", " in group ", g,
            "; it covers the whole step, so set it alike in all groups");
  }
}

const AdamFlavour kAdamFlavour = {"FusedAdam",
                                  owns<FusedAdamOptions>,
                                  adopt<FusedAdamOptions, torch::optim::AdamOptions>,
                                  [](const torch::optim::OptimizerOptions& options) {
                                    return adam_settings<FusedAdamOptions>("FusedAdam", options,
                                                                           kernels::WeightDecay::l2);
                                  },
                                  make_state<FusedAdamParamState>,
                                  export_options<FusedAdamOptions>,
                                  import_options<FusedAdamOptions>,
                                  base_lr<FusedAdamOptions>};

const AdamFlavour kAdamWFlavour = {"FusedAdamW",
                                   owns<FusedAdamWOptions>,
                                   adopt<FusedAdamWOptions, torch::optim::AdamWOptions>,
                                   [](const torch::optim::OptimizerOptions& options) {
                                     return adam_settings<FusedAdamWOptions>("FusedAdamW", options,
                                                                             kernels::WeightDecay::decoupled);
                                   },
                                   make_state<FusedAdamWParamState>,
                                   export_options<FusedAdamWOptions>,
                                   import_options<FusedAdamWOptions>,
                                   base_lr<FusedAdamWOptions>};

}  // namespace pacer::detail
