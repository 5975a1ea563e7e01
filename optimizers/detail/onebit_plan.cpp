#include <pacer/optimizers/detail/onebit_plan.h>

#include <algorithm>
#include <tuple>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

auto compression_of(const OneBitChoices& c) {
  return std::make_tuple(c.variance_floor, c.scale, c.block_scales, c.compress_alone, c.hierarchical,
                         c.one_bit);
}
auto all_of(const OneBitChoices& c) {
  return std::tuple_cat(compression_of(c), std::make_tuple(c.freeze_step, c.freeze_automatically,
                                                           c.allow_early_freeze, c.refresh_variance_every));
}

}  // namespace

bool OneBitPlan::exchanges_like(const OneBitPlan& earlier) const {
  return compression_of(*this) == compression_of(earlier) && compressed.size() >= earlier.compressed.size() &&
         std::equal(earlier.compressed.begin(), earlier.compressed.end(), compressed.begin());
}

OneBitPlan onebit_plan(const OptimizerTraits& traits, const ParamGroups& groups,
                       const std::vector<AdamGroupSettings>& settings) {
  OneBitPlan plan;
  if (groups.empty()) return plan;
  static_cast<OneBitChoices&>(plan) = traits.choices(groups.front().options());
  for (size_t g = 1; g < groups.size(); ++g) {
    require(all_of(traits.choices(groups[g].options())) == all_of(plan), traits.name, ": group ", g,
            " and group 0 differ in when to freeze or how to compress; only the options of the step itself, "
            "master weights and compress belong to a group");
  }
  require(plan.freeze_step.has_value() != plan.freeze_automatically.has_value(), traits.name,
          ": say when the variance freezes: either freeze_step(number of warm-up steps) or "
          "freeze_automatically(steps planned in all)");
  require(
      plan.freeze_step.value_or(1) >= 1, traits.name,
      ": freeze_step must be at least 1 step, because a variance has to be seen before it can freeze; not ",
      plan.freeze_step.value_or(1));
  require(plan.refresh_variance_every >= 0, traits.name, ": refresh_variance_every must be >= 0 steps, not ",
          plan.refresh_variance_every);
  require(plan.variance_floor >= 0 && plan.variance_floor <= 1, traits.name,
          ": variance_floor must be between 0 and 1, not ", plan.variance_floor);
  for (size_t g = settings.size(); g-- > 0;) {
    if (settings[g].compress) {
      plan.beta2 = settings[g].kernel.beta2;
      plan.bias_correction = settings[g].kernel.bias_correction != 0;
    }
  }
  for (const AdamGroupSettings& group : settings) plan.compressed.push_back(group.compress);
  return plan;
}

}  // namespace pacer::detail
