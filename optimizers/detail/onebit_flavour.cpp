#include <pacer/optimizers/detail/onebit_flavour.h>

#include <tuple>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/onebit_flavour_parts.h>
#include <pacer/optimizers/onebit_adam_options.h>
#include <pacer/optimizers/onebit_lamb_options.h>

namespace pacer::detail {
namespace {

auto run_wide(const OneBitChoices& c) {
  return std::make_tuple(c.freeze_step, c.freeze_automatically, c.allow_early_freeze,
                         c.refresh_variance_every, c.variance_floor, c.scale, c.block_scales,
                         c.compress_alone, c.hierarchical, c.one_bit);
}

}  // namespace

OneBitChoices onebit_choices(const torch::optim::OptimizerOptions& base) {
  if (const auto* lamb = dynamic_cast<const OneBitLambOptions*>(&base)) return common_choices(*lamb);
  const auto& adam = static_cast<const OneBitAdamOptions&>(base);
  OneBitChoices choices = common_choices(adam);
  choices.refresh_variance_every = adam.refresh_variance_every();
  return choices;
}

bool OneBitPlan::exchanges_like(const OneBitPlan& other) const {
  const auto all = [](const OneBitPlan& plan) {
    return std::make_tuple(plan.variance_floor, plan.compress_alone, plan.one_bit, plan.compression.scale(),
                           plan.compression.block_scales(), plan.compression.hierarchical(), plan.compressed);
  };
  return all(*this) == all(other);
}

OneBitPlan onebit_plan(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  OneBitPlan plan;
  if (groups.empty()) return plan;
  const OneBitChoices choices = onebit_choices(groups.front().options());
  for (size_t g = 1; g < groups.size(); ++g) {
    require(run_wide(onebit_choices(groups[g].options())) == run_wide(choices), optimizer, ": group ", g,
            " and group 0 differ in when to freeze or how to compress; only the options of the step itself, "
            "master weights and compress belong to a group");
  }
  require(choices.freeze_step.has_value() != choices.freeze_automatically.has_value(), optimizer,
          ": say when the variance freezes: either freeze_step(number of warm-up steps) or "
          "freeze_automatically(steps planned in all)");
  require(
      choices.freeze_step.value_or(1) >= 1, optimizer,
      ": freeze_step must be at least 1 step, because a variance has to be seen before it can freeze; not ",
      choices.freeze_step.value_or(1));
  require(choices.refresh_variance_every >= 0, optimizer, ": refresh_variance_every must be >= 0 steps, not ",
          choices.refresh_variance_every);
  require(choices.variance_floor >= 0 && choices.variance_floor <= 1, optimizer,
          ": variance_floor must be between 0 and 1, not ", choices.variance_floor);
  plan.freeze_step = choices.freeze_step;
  plan.freeze_automatically = choices.freeze_automatically;
  plan.allow_early_freeze = choices.allow_early_freeze;
  plan.refresh_variance_every = choices.refresh_variance_every;
  plan.variance_floor = choices.variance_floor;
  plan.compress_alone = choices.compress_alone;
  plan.one_bit = choices.one_bit;
  plan.compression.scale(choices.scale).block_scales(choices.block_scales);
  plan.compression.hierarchical(choices.hierarchical);
  for (const auto& group : groups) plan.compressed.push_back(is_compressed(group));
  return plan;
}

}  // namespace pacer::detail
