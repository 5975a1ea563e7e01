// An engine whose entries are ranges: what an optimizer needs that owns a part of a tensor.
#include "support/catch.h"

#include <pacer/collectives/communicator.h>
#include <pacer/optimizers/detail/step_engine.h>
#include <pacer/optimizers/onebit_adam_options.h>

#include "support/optimizers/contract.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

using detail::OptimizerTraits;
using detail::StepEngine;

struct Owner {
  explicit Owner(const torch::optim::OptimizerOptions& options = FusedAdamWOptions())
      : traits(detail::traits_of(options)) {}

  const OptimizerTraits& traits;
  StepEngine engine{traits};
  detail::ParamStates states;
};

void step(Owner& owner, const detail::ParamGroups& groups) {
  const torch::NoGradGuard no_grad;
  owner.engine.prepare(groups, detail::settings_of(owner.traits, groups), owner.states, {}, {});
  owner.engine.conclude(owner.engine.enqueue());
}

}  // namespace

TEST_CASE("engines that own the parts of a tensor do together what one does", "[fused_adam][lifecycle]") {
  torch::manual_seed(5);
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    const Tensor whole = torch::randn({40, 25}, at::kDouble).to(mode.dtype).requires_grad_();
    const Tensor parts = whole.detach().clone().requires_grad_();
    const auto options = with_mode(FusedAdamWOptions(0.01).seed(3), mode);
    detail::ParamGroups of_whole, of_parts;
    of_whole.emplace_back(std::vector<Tensor>{whole}, std::make_unique<FusedAdamWOptions>(options));
    of_parts.emplace_back(std::vector<Tensor>{parts}, std::make_unique<FusedAdamWOptions>(options));
    Owner one, first, second;
    first.engine.update_only(parts, {0, 333, {0, 333, 1000}});
    second.engine.update_only(parts, {333, 667, {0, 333, 1000}});
    for (int t = 0; t < 4; ++t) {
      set_random_gradients({whole}, {parts});
      if (t == 2) parts.mutable_grad() = parts.grad().t().contiguous().t();  // goes through a dense copy
      step(one, of_whole);
      step(first, of_parts);
      step(second, of_parts);
      CHECK(same_bits(whole, parts));
    }
    const auto& state = static_cast<const FusedAdamStateFields&>(*second.states.begin()->second);
    CHECK(state.exp_avg().sizes() == at::IntArrayRef{667});
    const auto refused = [&](ParameterRange range) {
      return refusal([&] { first.engine.update_only(parts, std::move(range)); });
    };
    CHECK(contains(refused({900, 200, {0, 900, 1000}}), "has no elements from 900 to 1100"));
    CHECK(contains(refused({0, 1000}), "the bounds of a parameter of 1000 elements"));
  }
}

TEST_CASE("an owned part of a parameter that a 1-bit optimizer finds frozen sits the step out",
          "[onebit_adam][lifecycle]") {
  const auto options = OneBitAdamOptions(0.01).freeze_step(9);
  const Tensor parameter = torch::ones({40}).requires_grad_();
  const Tensor gradient = torch::full({40}, 0.5);
  detail::ParamGroups groups;
  groups.emplace_back(std::vector<Tensor>{parameter}, std::make_unique<OneBitAdamOptions>(options));
  Owner owner(options);
  owner.engine.update_only(parameter, {0, 40, {0, 40}, gradient});
  step(owner, groups);
  CHECK(parameter[0].item<float>() < 0.995f);
  const Tensor before = parameter.detach().clone();
  parameter.requires_grad_(false);
  step(owner, groups);
  CHECK(same_bits(parameter, before));
  parameter.requires_grad_(true);
  step(owner, groups);
  CHECK(parameter[0].item<float>() < before[0].item<float>());
}

TEST_CASE("an optimizer passes over ranges of parameters that are not its own", "[fused_adam][lifecycle]") {
  const Tensor own = torch::ones({40}).requires_grad_(), other = torch::ones({40}).requires_grad_();
  FusedAdamW optimizer(std::vector<Tensor>{own}, FusedAdamWOptions(0.01));
  const auto ranks = Communicator::alone(at::kCPU);
  const auto range = [](int64_t count) { return ParameterRange{0, count, {0, 40}, torch::ones({count})}; };
  ParameterRanges ranges = {{own.unsafeGetTensorImpl(), range(40)}, {other.unsafeGetTensorImpl(), range(40)}};
  for (int call = 0; call < 2; ++call) {
    contract(optimizer).update_only(ranges, ranks);
    const Tensor before = own.detach().clone();
    const torch::NoGradGuard no_grad;
    contract(optimizer).prepare({});
    contract(optimizer).conclude(contract(optimizer).enqueue());
    CHECK(own.lt(before).all().item<bool>());
  }
  CHECK(other.eq(1).all().item<bool>());
  ranges[own.unsafeGetTensorImpl()] = range(20);
  CHECK(contains(refusal([&] { contract(optimizer).update_only(ranges, ranks); }), "shared out already"));
}

}  // namespace pacer::testing
