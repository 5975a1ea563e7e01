// State of FusedAdam and FusedAdamW in the hands of the user: whatever is put there counts at the next step.
#include <torch/optim/adagrad.h>

#include "support/catch.h"

#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

// One edit of a parameter's state, written once for both families.
template <class Optimizer>
using EditState = void (*)(Optimizer&, const Tensor&);

template <class Optimizer>
std::vector<std::pair<const char*, EditState<Optimizer>>> state_edits() {
  using State = ParamStateOf<Optimizer>;
  return {
      {"step", [](Optimizer& o, const Tensor& p) { state_of(o, p).step(100); }},
      {"moments",
       [](Optimizer& o, const Tensor& p) {
         state_of(o, p)
             .exp_avg(torch::full_like(p, 0.5).detach())
             .exp_avg_sq(torch::full_like(p, 0.25).detach());
       }},
      {"moments in other strides",
       [](Optimizer& o, const Tensor& p) {
         state_of(o, p).exp_avg(torch::linspace(0, 1, p.numel(), at::kDouble).view({4, 4}).t());
       }},
      {"moments written in place", [](Optimizer& o, const Tensor& p) { state_of(o, p).exp_avg().mul_(2); }},
      {"moments set through a reference",
       [](Optimizer& o, const Tensor& p) { state_of(o, p).exp_avg() = torch::ones_like(p).detach(); }},
      {"a tensor put where the last one was",
       [](Optimizer& o, const Tensor& p) {
         state_of(o, p).exp_avg().reset();
         state_of(o, p).exp_avg() = torch::ones_like(p).detach();
       }},
      {"both tensors put where the last ones were",
       [](Optimizer& o, const Tensor& p) {
         state_of(o, p).exp_avg_sq().reset();
         state_of(o, p).exp_avg().reset();
         state_of(o, p).exp_avg() = torch::full_like(p, 0.5).detach();
         state_of(o, p).exp_avg_sq() = torch::full_like(p, 0.5).detach();
       }},
      {"a state tensor's memory exchanged",
       [](Optimizer& o, const Tensor& p) {
         state_of(o, p).exp_avg().set_data(torch::full_like(p, 0.5).detach());
       }},
      {"a state tensor's memory exchanged for another part of it",
       [](Optimizer& o, const Tensor& p) {
         Tensor& moment = state_of(o, p).exp_avg();
         const Tensor halves = moment.numel() * 16 == static_cast<int64_t>(moment.storage().nbytes())
                                   ? at::empty({0}, moment.options()).set_(moment.storage(), 0, {2, 4, 4})
                                   : torch::stack({moment, moment.flip(0)}).detach();
         moment.set_data(halves[moment.storage_offset() == 0 ? 1 : 0]);
       }},
      {"the first moment transposed in place",
       [](Optimizer& o, const Tensor& p) { state_of(o, p).exp_avg().t_(); }},
      {"the second moment transposed in place",
       [](Optimizer& o, const Tensor& p) { state_of(o, p).exp_avg_sq().t_(); }},
      {"erased", [](Optimizer& o, const Tensor& p) { o.state().erase(p.unsafeGetTensorImpl()); }},
      {"all erased", [](Optimizer& o, const Tensor&) { o.state().clear(); }},
      {"replaced",
       [](Optimizer& o, const Tensor& p) {
         auto state = std::make_unique<State>();
         state->step(9);
         state->exp_avg(torch::full_like(p, 0.5).detach()).exp_avg_sq(torch::full_like(p, 0.5).detach());
         o.state()[p.unsafeGetTensorImpl()] = std::move(state);
       }},
      {"erased, then new at the same address",
       [](Optimizer& o, const Tensor& p) {
         o.state().erase(p.unsafeGetTensorImpl());
         auto state = std::make_unique<State>();
         state->step(9);
         state->exp_avg(torch::full_like(p, 0.5).detach()).exp_avg_sq(torch::full_like(p, 0.5).detach());
         o.state()[p.unsafeGetTensorImpl()] = std::move(state);
       }},
      {"a copy that shares the tensors put back",
       [](Optimizer& o, const Tensor& p) {
         o.state()[p.unsafeGetTensorImpl()] = o.state().at(p.unsafeGetTensorImpl())->clone();
       }},
      {"a copy put back",
       [](Optimizer& o, const Tensor& p) {
         auto copy = o.state().at(p.unsafeGetTensorImpl())->clone();
         static_cast<State&>(*copy)
             .exp_avg(state_of(o, p).exp_avg().clone())
             .exp_avg_sq(state_of(o, p).exp_avg_sq().clone());
         o.state()[p.unsafeGetTensorImpl()] = std::move(copy);
       }},
  };
}

TEMPLATE_TEST_CASE("state edited by hand is honoured at the next step", "[fused_adam]", FusedAdam,
                   FusedAdamW) {
  const auto ours = state_edits<TestType>();
  const auto theirs = state_edits<PeerOf<TestType>>();
  for (size_t i = 0; i < ours.size(); ++i) {
    for (const bool replanned : {false, true}) {
      CAPTURE(ours[i].first, replanned);
      torch::manual_seed(67);
      Twins<TestType> twins(random_parameters({{4, 4}, {3}}, at::kDouble), 0.01);
      for (int round = 0; round < 3; ++round) {
        twins.step_with_random_gradients();
        if (replanned) twins.add(torch::randn({2}, at::kDouble).requires_grad_());
        ours[i].second(twins.optimizer, twins.ours[0]);
        theirs[i].second(twins.peer, twins.theirs[0]);
        for (int step = 0; step < 2; ++step) twins.step_with_random_gradients();
        CHECK(twins.apart() <= 1e-13);
      }
      for (size_t p = 0; p < 2; ++p) {
        CHECK(state_of(twins.optimizer, twins.ours[p]).step() ==
              state_of(twins.peer, twins.theirs[p]).step());
        CHECK(distance(state_of(twins.optimizer, twins.ours[p]).exp_avg(),
                       state_of(twins.peer, twins.theirs[p]).exp_avg()) <= 1e-14);
      }
    }
  }
}

// What a program may do to the table of states, written once for both families.
template <class Optimizer>
struct TableEdits {
  using State = ParamStateOf<Optimizer>;
  using Table = std::remove_reference_t<decltype(std::declval<Optimizer&>().state())>;

  static void exchange(Optimizer& o, const std::vector<Tensor>& p) {
    std::swap(o.state().at(p[0].unsafeGetTensorImpl()), o.state().at(p[2].unsafeGetTensorImpl()));
  }
  static void move(Optimizer& o, const std::vector<Tensor>&) {
    Table table;
    for (auto& [key, state] : o.state()) table[key] = std::move(state);
    o.state() = std::move(table);
  }
  // The former table lives on, with the former states.
  static void copy(Optimizer& o, const std::vector<Tensor>&) {
    former = std::move(o.state());
    for (const auto& [key, state] : former) o.state()[key] = state->clone();
  }
  static inline Table former;
  // States of tensors that the optimizer does not know: the table grows, and moves what it has.
  static void add_strangers(Optimizer& o, const std::vector<Tensor>&) {
    for (char& stranger : strangers) o.state()[&stranger] = std::make_unique<State>();
  }
  static void erase_strangers(Optimizer& o, const std::vector<Tensor>&) {
    for (char& stranger : strangers) o.state().erase(&stranger);
  }
  static inline char strangers[200];

  using Edit = void (*)(Optimizer&, const std::vector<Tensor>&);
  static constexpr Edit all[] = {exchange, move, copy, add_strangers, exchange, erase_strangers, exchange};
};

TEMPLATE_TEST_CASE("a parameter has the state that the table of states has for it", "[fused_adam]", FusedAdam,
                   FusedAdamW) {
  torch::manual_seed(68);
  std::vector<std::vector<int64_t>> shapes(40, {3});
  Twins<TestType> twins(random_parameters(shapes, at::kDouble), 0.01);
  for (size_t i = 0; i < std::size(TableEdits<TestType>::all); ++i) {
    CAPTURE(i);
    for (int step = 0; step < 2; ++step) twins.step_with_random_gradients();
    TableEdits<TestType>::all[i](twins.optimizer, twins.ours);
    TableEdits<PeerOf<TestType>>::all[i](twins.peer, twins.theirs);
    for (int step = 0; step < 2; ++step) twins.step_with_random_gradients();
    CHECK(twins.apart() <= 1e-13);
  }
  CHECK(state_of(twins.optimizer, twins.ours[2]).step() == 28);
  TableEdits<TestType>::former.clear();
  TableEdits<PeerOf<TestType>>::former.clear();
}

TEST_CASE("state that cannot be is refused by the parameter's name", "[fused_adam]") {
  Twins<FusedAdamW> twins(random_parameters({{4, 4}, {3}}, at::kFloat), 0.01);
  twins.step_with_random_gradients();
  auto& state = state_of(twins.optimizer, twins.ours[1]);
  const Tensor good = state.exp_avg();
  for (const Tensor& bad : {torch::zeros({4}), torch::zeros({3, 1}), torch::zeros({})}) {
    state.exp_avg(bad);
    CHECK(unless_refused(twins.optimizer, {"parameter 1 of group 0 (", "exp_avg"},
                         [&] { twins.optimizer.step(); }) == "");
  }
  CHECK(refusal([&] { state.step(-1); })[0] != '<');
  state.exp_avg(good);
  twins.step_with_random_gradients();
  CHECK(twins.apart() <= 4e-6);
}

TEST_CASE("the state of another optimizer is refused by the parameter's name", "[fused_adam]") {
  const auto parameters = random_parameters({{4}, {3}}, at::kFloat);
  FusedAdamW optimizer(parameters);
  for (const bool running : {false, true}) {
    set_random_gradients(parameters);
    if (running) optimizer.step();
    auto foreign = std::make_unique<torch::optim::AdagradParamState>();
    foreign->step(1).sum(torch::zeros({3}));
    optimizer.state()[parameters[1].unsafeGetTensorImpl()] = std::move(foreign);
    const auto before = clones(parameters);
    CHECK(contains(refusal([&] { optimizer.step(); }), "parameter 1 of group 0 (shape ["));
    CHECK(same_bits(before, parameters));
    optimizer.state().erase(parameters[1].unsafeGetTensorImpl());
  }
  optimizer.step();
  CHECK(state_of(optimizer, parameters[0]).step() == 2);
  CHECK(state_of(optimizer, parameters[1]).step() == 1);
}

TEST_CASE("a copy of a parameter's state is a snapshot of its step count", "[fused_adam]") {
  Twins<FusedAdam> twins(random_parameters({{4}}, at::kFloat), 0.01);
  twins.step_with_random_gradients();
  const FusedAdamParamState copy = state_of(twins.optimizer, twins.ours[0]);
  FusedAdamParamState assigned;
  assigned = copy;
  twins.step_with_random_gradients();
  CHECK(copy.step() == 1);
  CHECK(assigned.step() == 1);
  CHECK(state_of(twins.optimizer, twins.ours[0]).step() == 2);
  CHECK(copy.exp_avg().is_same(state_of(twins.optimizer, twins.ours[0]).exp_avg()));
}

TEST_CASE("amsgrad may be switched on and off between steps", "[fused_adam]") {
  torch::manual_seed(68);
  Twins<FusedAdamW> twins(random_parameters({{40}}, at::kDouble),
                          torch::optim::AdamWOptions(0.01).amsgrad(true));
  for (const bool amsgrad : {true, false, true}) {
    options_of(twins.optimizer).amsgrad(amsgrad);
    options_of(twins.peer).amsgrad(amsgrad);
    for (int step = 0; step < 3; ++step) twins.step_with_random_gradients();
    CHECK(twins.apart() <= 1e-14);
  }
  FusedAdamW late(twins.ours, 0.01);
  late.step();
  options_of(late).amsgrad(true);
  late.step();
  CHECK(
      same_bits(state_of(late, twins.ours[0]).max_exp_avg_sq(), state_of(late, twins.ours[0]).exp_avg_sq()));
}

}  // namespace
}  // namespace pacer::testing
