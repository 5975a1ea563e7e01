#include <pacer/optimizers/detail/onebit_flavour.h>

#include <tuple>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/flavour_parts.h>

namespace pacer::detail {
namespace {

constexpr const char* kOneBitAdam = "OneBitAdam";

AdamGroupSettings onebit_settings(const torch::optim::OptimizerOptions& base) {
  const auto& options = static_cast<const OneBitAdamOptions&>(base);
  check_rule_options(kOneBitAdam, options);
  require(options.master_weights() != MasterWeights::none, kOneBitAdam,
          ": 16-bit parameters need a master copy or a remainder, because signs of one scale are too coarse "
          "for 8 bits; leave master_weights at automatic");
  AdamGroupSettings settings;
  set_rule(options, settings.kernel);
  settings.kernel.decay_mode =
      options.weight_decay() == 0 ? kernels::WeightDecay::none : kernels::WeightDecay::decoupled;
  settings.master_weights = options.master_weights();
  return settings;
}

std::unique_ptr<torch::optim::OptimizerOptions> adopt_onebit(const torch::optim::OptimizerOptions& options) {
  require(!owns<FusedAdamOptions>(options), kOneBitAdam,
          ": FusedAdamOptions add weight decay to the gradient (L2), which a momentum of signs cannot carry; "
          "use OneBitAdamOptions, whose decay is decoupled");
  return owns<OneBitAdamOptions>(options) ? options.clone() : nullptr;
}

// Calls put(name, number) for all that export_rule has not.
template <class Options, class Put>
void for_own_options(Options& options, const Put& put) {
  put("compress", options.compress());
  put("freeze_step", options.freeze_step().value_or(0));
  put("freeze_automatically", options.freeze_automatically().value_or(0));
  put("allow_early_freeze", options.allow_early_freeze());
  put("refresh_variance_every", options.refresh_variance_every());
  put("variance_floor", options.variance_floor());
  put("scale", static_cast<int64_t>(options.scale()));
  put("block_scales", options.block_scales());
  put("compress_alone", options.compress_alone());
  put("one_bit", options.one_bit());
}

void export_onebit_options(const torch::optim::OptimizerOptions& base, const std::string& prefix,
                           NamedTensors& state) {
  const auto& options = static_cast<const OneBitAdamOptions&>(base);
  export_rule(options, prefix, state);
  for_own_options(options,
                  [&](const char* name, auto value) { state[prefix + name] = number_tensor(value); });
}

std::unique_ptr<torch::optim::OptimizerOptions> import_onebit_options(const std::string& prefix,
                                                                      const NamedTensors& state) {
  auto options = import_rule<OneBitAdamOptions>(prefix, state);
  const auto flag = [&](const char* name) { return require_number<bool>(state, prefix + name); };
  const auto count = [&](const char* name) { return require_number<int64_t>(state, prefix + name); };
  const auto steps = [&](const char* name) {
    const int64_t number = count(name);
    return number == 0 ? std::nullopt : std::optional<int64_t>(number);
  };
  options->compress(flag("compress")).freeze_step(steps("freeze_step"));
  options->freeze_automatically(steps("freeze_automatically"));
  options->allow_early_freeze(flag("allow_early_freeze"));
  options->refresh_variance_every(count("refresh_variance_every"));
  options->variance_floor(require_number<double>(state, prefix + "variance_floor"));
  options->scale(count("scale") == 0 ? kernels::ScaleNorm::rms : kernels::ScaleNorm::l1);
  options->block_scales(flag("block_scales")).compress_alone(flag("compress_alone"));
  options->one_bit(flag("one_bit"));
  return options;
}

auto run_wide(const OneBitAdamOptions& o) {
  return std::make_tuple(o.freeze_step(), o.freeze_automatically(), o.allow_early_freeze(),
                         o.refresh_variance_every(), o.variance_floor(), o.scale(), o.block_scales(),
                         o.compress_alone(), o.one_bit());
}

}  // namespace

bool OneBitPlan::exchanges_like(const OneBitPlan& other) const {
  const auto all = [](const OneBitPlan& plan) {
    return std::make_tuple(plan.variance_floor, plan.compress_alone, plan.one_bit, plan.compression.scale(),
                           plan.compression.block_scales(), plan.compressed);
  };
  return all(*this) == all(other);
}

OneBitPlan onebit_plan(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  OneBitPlan plan;
  if (groups.empty()) return plan;
  const auto& options = static_cast<const OneBitAdamOptions&>(groups.front().options());
  for (size_t g = 1; g < groups.size(); ++g) {
    require(run_wide(static_cast<const OneBitAdamOptions&>(groups[g].options())) == run_wide(options),
            kOneBitAdam, ": group ", g,
            " and group 0 differ in when to freeze or how to compress; only learning rate, betas, "
            "eps, weight decay, bias correction, master weights and compress belong to a group");
  }
  require(options.freeze_step().has_value() != options.freeze_automatically().has_value(), kOneBitAdam,
          ": say when the variance freezes: either freeze_step(number of warm-up steps) or "
          "freeze_automatically(steps planned in all)");
  require(
      options.freeze_step().value_or(1) >= 1, kOneBitAdam,
      ": freeze_step must be at least 1 step, because a variance has to be seen before it can freeze; not ",
      options.freeze_step().value_or(1));
  require(options.refresh_variance_every() >= 0, kOneBitAdam,
          ": refresh_variance_every must be >= 0 steps, not ", options.refresh_variance_every());
  require(options.variance_floor() >= 0 && options.variance_floor() <= 1, kOneBitAdam,
          ": variance_floor must be between 0 and 1, not ", options.variance_floor());
  plan.freeze_step = options.freeze_step();
  plan.freeze_automatically = options.freeze_automatically();
  plan.allow_early_freeze = options.allow_early_freeze();
  plan.refresh_variance_every = options.refresh_variance_every();
  plan.variance_floor = options.variance_floor();
  plan.compress_alone = options.compress_alone();
  plan.one_bit = options.one_bit();
  plan.compression.scale(options.scale()).block_scales(options.block_scales());
  for (const auto& group : groups) plan.compressed.push_back(is_compressed(group));
  return plan;
}

const AdamFlavour kOneBitAdamFlavour = {
    kOneBitAdam,           owns<OneBitAdamOptions>,          adopt_onebit,
    onebit_settings,       make_state<OneBitAdamParamState>, export_onebit_options,
    import_onebit_options, base_lr<OneBitAdamOptions>};

}  // namespace pacer::detail
