// State edited as LibTorch's users do it, through torch's own types; and an optimizer that was moved from.
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_lamb.h>

#include "support/catch.h"
#include "support/checkpoints/archives.h"
#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

template <class Optimizer>
using TorchState = ParamStateOf<PeerOf<Optimizer>>;

// As a program would that was written for torch's optimizer.
template <class State, class Optimizer>
State& cast_state(Optimizer& optimizer, const Tensor& parameter) {
  return static_cast<State&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
}

// One edit through torch's type, for both optimizers.
template <class State>
using Edit = std::function<void(torch::optim::Optimizer&, const Tensor&)>;

template <class State>
std::vector<std::pair<const char*, Edit<State>>> edits() {
  using Optimizer = torch::optim::Optimizer;
  return {
      {"momentum cleared", [](Optimizer& o, const Tensor& p) { cast_state<State>(o, p).exp_avg().zero_(); }},
      {"a variance given",
       [](Optimizer& o, const Tensor& p) {
         cast_state<State>(o, p).exp_avg_sq(torch::full_like(p, 0.5).detach());
       }},
      {"the maximum given",
       [](Optimizer& o, const Tensor& p) {
         cast_state<State>(o, p).max_exp_avg_sq(torch::full_like(p, 2).detach());
       }},
      {"steps set", [](Optimizer& o, const Tensor& p) { cast_state<State>(o, p).step(7); }},
      {"a step added", [](Optimizer& o, const Tensor& p) { cast_state<State>(o, p).step() += 1; }},
      {"a new state",
       [](Optimizer& o, const Tensor& p) {
         auto state = std::make_unique<State>();
         state->step(3);
         state->exp_avg(torch::full_like(p, 0.1).detach()).exp_avg_sq(torch::full_like(p, 0.2).detach());
         state->max_exp_avg_sq(torch::full_like(p, 0.3).detach());
         o.state()[p.unsafeGetTensorImpl()] = std::move(state);
       }},
      {"a clone that was edited",
       [](Optimizer& o, const Tensor& p) {
         auto state = o.state().at(p.unsafeGetTensorImpl())->clone();
         static_cast<State&>(*state).exp_avg(torch::full_like(p, 0.1).detach());
         o.state()[p.unsafeGetTensorImpl()] = std::move(state);
       }},
  };
}

template <class Optimizer>
void require_layout(const std::shared_ptr<Optimizer>& optimizer, const Tensor& parameter) {
  for (int step = 0; step < 2; ++step) {
    parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer->step();
  }
  const auto& own = cast_state<FusedAdamStateFields>(*optimizer, parameter);
  const auto& adam = cast_state<torch::optim::AdamParamState>(*optimizer, parameter);
  const auto& adamw = cast_state<torch::optim::AdamWParamState>(*optimizer, parameter);
  CHECK((adam.step() == 2 && adamw.step() == 2 && own.step() == 2));
  CHECK((adam.exp_avg().is_same(own.exp_avg()) && adamw.exp_avg().is_same(own.exp_avg())));
  CHECK((adam.exp_avg_sq().is_same(own.exp_avg_sq()) && adamw.exp_avg_sq().is_same(own.exp_avg_sq())));
  CHECK(adam.max_exp_avg_sq().is_same(own.max_exp_avg_sq()));
}

}  // namespace

TEMPLATE_TEST_CASE("state edited through torch's type is what the next step takes", "[fused_adam]", FusedAdam,
                   FusedAdamW) {
  using State = TorchState<TestType>;
  for (const auto& [name, edit] : edits<State>()) {
    CAPTURE(name);
    torch::manual_seed(5);
    Twins<TestType> twins(random_parameters({{4, 4}, {3}}, at::kDouble),
                          OptionsOf<PeerOf<TestType>>(0.01).amsgrad(true));
    for (int round = 0; round < 2; ++round) {
      for (int step = 0; step < 2; ++step) twins.step_with_random_gradients();
      edit(twins.optimizer, twins.ours[0]);
      edit(twins.peer, twins.theirs[0]);
      CHECK(cast_state<State>(twins.optimizer, twins.ours[0]).step() ==
            cast_state<State>(twins.peer, twins.theirs[0]).step());
    }
    for (int step = 0; step < 3; ++step) {
      twins.step_with_random_gradients();
      CHECK(twins.apart() <= 1e-13);
    }
    for (size_t p = 0; p < 2; ++p) {
      CHECK(state_of(twins.optimizer, twins.ours[p]).step() == state_of(twins.peer, twins.theirs[p]).step());
      CHECK(cast_state<State>(twins.optimizer, twins.ours[p]).step() ==
            state_of(twins.peer, twins.theirs[p]).step());
    }
  }
}

TEST_CASE("every state has its first fields where torch's have theirs", "[fused_adam]") {
  const auto parameter = [] { return torch::ones({4}).requires_grad_(); };
  Tensor p = parameter();
  require_layout(std::make_shared<FusedAdam>(std::vector<Tensor>{p}, FusedAdamOptions().amsgrad(true)), p);
  require_layout(std::make_shared<FusedAdamW>(std::vector<Tensor>{p}, FusedAdamWOptions().amsgrad(true)), p);
  require_layout(std::make_shared<FusedLamb>(std::vector<Tensor>{p}), p);
  require_layout(std::make_shared<OneBitAdam>(std::vector<Tensor>{p}, OneBitAdamOptions().freeze_step(100)),
                 p);
  require_layout(std::make_shared<OneBitLamb>(std::vector<Tensor>{p}, OneBitLambOptions().freeze_step(100)),
                 p);
}

TEST_CASE("a state of torch's type is saved, by name and in archives, before any step has adopted it",
          "[fused_adam]") {
  const Tensor p = torch::ones({4}).requires_grad_();
  const auto made = [&] {
    auto optimizer = std::make_unique<FusedAdamW>(std::vector<Tensor>{p});
    auto state = std::make_unique<torch::optim::AdamWParamState>();
    state->step(3);
    state->exp_avg(torch::full({4}, 0.1)).exp_avg_sq(torch::full({4}, 0.2));
    optimizer->state()[p.unsafeGetTensorImpl()] = std::move(state);
    return optimizer;
  };
  const auto check = [&](FusedAdamW& loaded) {
    CHECK(state_of(loaded, p).step() == 3);
    CHECK(state_of(loaded, p).exp_avg().equal(torch::full({4}, 0.1)));
    CHECK(state_of(loaded, p).exp_avg_sq().equal(torch::full({4}, 0.2)));
  };
  FusedAdamW by_name({p}), from_archive({p});
  by_name.import_state(made()->export_state());
  check(by_name);
  load_from(from_archive, saved(*made()));
  check(from_archive);
}

TEST_CASE("a bf16 parameter adopts torch's moments of 16 bits in its own dtype", "[fused_adam]") {
  const Tensor p = torch::ones({8}, at::kBFloat16).requires_grad_();
  FusedAdamW optimizer({p});
  auto state = std::make_unique<torch::optim::AdamWParamState>();
  state->step(1);
  state->exp_avg(torch::full({8}, 0.5, at::kBFloat16)).exp_avg_sq(torch::full({8}, 0.25, at::kBFloat16));
  optimizer.state()[p.unsafeGetTensorImpl()] = std::move(state);
  p.mutable_grad() = torch::zeros({8}, at::kBFloat16);
  optimizer.step();
  CHECK(state_of(optimizer, p).step() == 2);
  CHECK(state_of(optimizer, p).exp_avg().equal(torch::full({8}, 0.5F) * 0.9F));
}

TEST_CASE("an optimizer that was moved from says so", "[fused_adam]") {
  const Tensor p = torch::ones({4}).requires_grad_();
  FusedAdamW source({p});
  p.mutable_grad() = torch::ones({4});
  FusedAdamW target(std::move(source));
  const std::vector<std::pair<const char*, std::function<void()>>> uses = {
      {"step", [&] { source.step(); }},
      {"export", [&] { (void)source.export_state(); }},
      {"save", [&] { (void)saved(source); }},
      {"a group", [&] { source.add_param_group(torch::optim::OptimizerParamGroup({p})); }},
      {"skipped steps", [&] { (void)source.skipped_steps(); }},
      {"load", [&] { load_from(source, saved(target)); }},
      {"import", [&] { source.import_state(target.export_state()); }},
  };
  for (const auto& [name, use] : uses) {
    CAPTURE(name);
    CHECK(contains(refusal(use), "moved from"));
  }
  target.step();
  CHECK(state_of(target, p).step() == 1);
  source = FusedAdamW({p});  // a new one may take its place
  source.step();
  CHECK(state_of(source, p).step() == 1);
}

}  // namespace pacer::testing
