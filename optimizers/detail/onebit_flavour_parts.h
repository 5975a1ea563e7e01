// The parts of an AdamFlavour that the 1-bit optimizers share, as templates over their option types.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/flavour_parts.h>
#include <pacer/optimizers/detail/onebit_flavour.h>

namespace pacer::detail {

// All but how often the variance is refreshed.
template <class Options>
OneBitChoices common_choices(const Options& options) {
  OneBitChoices choices;
  choices.compress = options.compress();
  choices.freeze_step = options.freeze_step();
  choices.freeze_automatically = options.freeze_automatically();
  choices.allow_early_freeze = options.allow_early_freeze();
  choices.variance_floor = options.variance_floor();
  choices.scale = options.scale();
  choices.block_scales = options.block_scales();
  choices.compress_alone = options.compress_alone();
  choices.hierarchical = options.hierarchical();
  choices.one_bit = options.one_bit();
  return choices;
}

template <class Options>
AdamGroupSettings onebit_settings(const char* optimizer, const Options& options) {
  check_rule_options(optimizer, options);
  require(options.master_weights() != MasterWeights::none, optimizer,
          ": 16-bit parameters need a master copy or a remainder, because signs of one scale are too coarse "
          "for 8 bits; leave master_weights at automatic");
  AdamGroupSettings settings;
  set_rule(options, settings.kernel);
  settings.master_weights = options.master_weights();
  return settings;
}

template <class Options>
void export_choices(const Options& options, const std::string& prefix, NamedTensors& state) {
  const auto put = [&](const char* name, auto value) { state[prefix + name] = number_tensor(value); };
  put("compress", options.compress());
  put("freeze_step", options.freeze_step().value_or(0));
  put("freeze_automatically", options.freeze_automatically().value_or(0));
  put("allow_early_freeze", options.allow_early_freeze());
  put("variance_floor", options.variance_floor());
  put("scale", static_cast<int64_t>(options.scale()));
  put("block_scales", options.block_scales());
  put("compress_alone", options.compress_alone());
  put("hierarchical", options.hierarchical());
  put("one_bit", options.one_bit());
}

template <class Options>
void import_choices(const std::string& prefix, const NamedTensors& state, Options& options) {
  const auto flag = [&](const char* name) { return require_number<bool>(state, prefix + name); };
  const auto steps = [&](const char* name) {
    const auto number = require_number<int64_t>(state, prefix + name);
    return number == 0 ? std::nullopt : std::optional<int64_t>(number);
  };
  options.compress(flag("compress")).freeze_step(steps("freeze_step"));
  options.freeze_automatically(steps("freeze_automatically"));
  options.allow_early_freeze(flag("allow_early_freeze"));
  options.variance_floor(require_number<double>(state, prefix + "variance_floor"));
  options.scale(import_choice(prefix + "scale", kernels::ScaleNorm::l1, state));
  options.block_scales(flag("block_scales")).compress_alone(flag("compress_alone"));
  options.hierarchical(flag("hierarchical")).one_bit(flag("one_bit"));
}

}  // namespace pacer::detail
