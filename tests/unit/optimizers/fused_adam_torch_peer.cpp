// What goes back and forth between FusedAdam(W) and torch's Adam(W): options, archives, the state of a
// running optimizer.
#include "support/catch.h"
#include "support/heard_warnings.h"

#include <sstream>
#include <type_traits>

#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <pacer/optimizers/detail/group_defaults.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

using Group = torch::optim::OptimizerParamGroup;

TEMPLATE_TEST_CASE("torch's options convert, alone and inside a parameter group", "[fused_adam]", FusedAdam,
                   FusedAdamW) {
  using TorchOptions = OptionsOf<PeerOf<TestType>>;
  const auto theirs = TorchOptions(0.25).betas({0.1, 0.2}).eps(0.3).weight_decay(0.4).amsgrad(true);
  const OptionsOf<TestType> ours = theirs;
  CHECK(ours == OptionsOf<TestType>(0.25).betas({0.1, 0.2}).eps(0.3).weight_decay(0.4).amsgrad(true));
  const auto parameters = random_parameters({{2}, {3}, {4}}, at::kDouble);

  TestType optimizer({Group({parameters[0]}, std::make_unique<TorchOptions>(theirs))}, theirs);
  optimizer.add_param_group(Group({parameters[1]}, std::make_unique<TorchOptions>(TorchOptions(0.125))));
  // The base class's function is not virtual, and knows nothing of our options.
  static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(Group({parameters[2]}));
  optimizer.param_groups()[2].set_options(std::make_unique<TorchOptions>(theirs));
  set_random_gradients(parameters);
  optimizer.step();
  CHECK(options_of(optimizer, 0) == ours);
  CHECK(options_of(optimizer, 1).lr() == 0.125);
  CHECK(options_of(optimizer, 2) == ours);
  for (const Tensor& parameter : parameters) CHECK(state_of(optimizer, parameter).step() == 1);
}

// LibTorch's versions differ in what a group's options take from the defaults, so torch's optimizer says it.
TEMPLATE_TEST_CASE("a group's options take from the defaults what torch's optimizers take", "[fused_adam]",
                   FusedAdam, FusedAdamW) {
  using Peer = PeerOf<TestType>;
  using TorchOptions = OptionsOf<Peer>;
  const TorchOptions defaults = TorchOptions(0.25).betas({0.1, 0.2}).eps(0.3).weight_decay(0.4).amsgrad(true);
  // Each leaves something alone, or sets it to what the constructor says.
  const std::vector<TorchOptions> of_groups = {TorchOptions(),
                                               TorchOptions(0.5),
                                               TorchOptions(1e-3).betas({0.5, 0.6}),
                                               TorchOptions().eps(1e-8).weight_decay(0),
                                               TorchOptions(0.25).weight_decay(1e-2).amsgrad(false),
                                               TorchOptions().betas({0.9, 0.2})};
  const auto parameters = random_parameters({{2}, {3}, {4}}, at::kDouble);
  const auto as_torchs = [](const TorchOptions& o) {  // what lies there, of either type
    return TorchOptions(o.lr())
        .betas(o.betas())
        .eps(o.eps())
        .weight_decay(o.weight_decay())
        .amsgrad(o.amsgrad());
  };
  const auto options_of_all = [&](auto* type, const auto& make_options) {
    using Optimizer = std::remove_pointer_t<decltype(type)>;
    std::vector<TorchOptions> found;
    for (const TorchOptions& options : of_groups) {
      const auto group = [&](size_t i) { return Group({parameters[i]}, make_options(options)); };
      Optimizer optimizer({group(0), Group({parameters[1]})}, defaults);
      optimizer.add_param_group(group(2));
      set_random_gradients(parameters);
      optimizer.step();
      for (auto& each : optimizer.param_groups()) {
        found.push_back(as_torchs(static_cast<const TorchOptions&>(each.options())));
      }
    }
    return found;
  };
  const auto torchs = [](const TorchOptions& options) { return std::make_unique<TorchOptions>(options); };
  const auto ours = [](const TorchOptions& options) {
    return std::make_unique<OptionsOf<TestType>>(options);
  };
  const auto expected = options_of_all(static_cast<Peer*>(nullptr), torchs);
  CHECK((options_of_all(static_cast<TestType*>(nullptr), torchs) == expected));
  CHECK((options_of_all(static_cast<TestType*>(nullptr), ours) == expected));
}

TEST_CASE("a group's options take what only pacer has from the defaults, too, where torch's would",
          "[fused_adam]") {
  const auto parameters = random_parameters({{2}, {3}}, at::kBFloat16);
  const auto defaults = FusedAdamWOptions(0.25).master_weights(MasterWeights::fp32).bias_correction(false);
  const auto group = [&](size_t i) {
    return Group({parameters[i]}, std::make_unique<FusedAdamWOptions>(FusedAdamWOptions().weight_decay(0)));
  };
  FusedAdamW optimizer({group(0)}, defaults);
  optimizer.add_param_group(group(1));
  set_random_gradients(parameters);
  optimizer.step();
  FusedAdamWOptions expected;
  if (detail::kGroupsInheritDefaults) expected = defaults;
  for (const size_t g : {0, 1}) CHECK(options_of(optimizer, g) == expected.weight_decay(0));
  // What is set later is what it is.
  options_of(optimizer, 0).lr(1e-3);
  optimizer.step();
  CHECK(options_of(optimizer, 0).lr() == 1e-3);
}

TEST_CASE("options that torch's add_param_group drops are not dropped without a word", "[fused_adam]") {
  const auto parameters = random_parameters({{2}, {3}}, at::kDouble);
  std::string said;
  HeardWarnings ear(said);
  const c10::WarningUtils::WarningHandlerGuard guard(&ear);
  FusedAdamW optimizer({parameters[0]}, 0.25);
  static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(
      Group({parameters[1]}, std::make_unique<FusedAdamWOptions>(0.5)));
  set_random_gradients(parameters);
  for (int step = 0; step < 2; ++step) optimizer.step();
  if (detail::kGroupsInheritDefaults) {
    CHECK(options_of(optimizer, 1).lr() == 0.25);
    CHECK(contains(said, "FusedAdamW: group 1 was added through torch::optim::Optimizer, which drops"));
    CHECK(said.find("group 1") == said.rfind("group 1"));  // once
    said.clear();
    optimizer.param_groups().pop_back();
    optimizer.step();
    optimizer.add_param_group(Group({parameters[1]}, std::make_unique<FusedAdamWOptions>(0.5)));
    optimizer.step();
    CHECK(said.empty());
    CHECK(options_of(optimizer, 1).lr() == 0.5);
  } else {
    CHECK(options_of(optimizer, 1).lr() == 0.5);
    CHECK(said.empty());
  }
}

TEMPLATE_TEST_CASE("an optimizer may be saved before its first step, with a group that has torch's options",
                   "[fused_adam]", FusedAdam, FusedAdamW) {
  using TorchOptions = OptionsOf<PeerOf<TestType>>;
  const auto parameters = random_parameters({{2}, {3}}, at::kDouble);
  const auto second = [&] {
    return Group({parameters[1]},
                 std::make_unique<TorchOptions>(TorchOptions(0.5).betas({0.1, 0.2}).amsgrad(true)));
  };
  TestType optimizer({parameters[0]}, 0.25), restored({parameters[0]});
  optimizer.add_param_group(second());
  optimizer.param_groups()[1].set_options(second().options().clone());
  restored.add_param_group(second());
  options_of(restored, 1).lr(0.125).amsgrad(false).seed(7);
  TestType exported({parameters[0]});
  exported.add_param_group(second());
  exported.param_groups()[1].set_options(second().options().clone());
  CHECK(require_number<double>(exported.export_state(), "group/1/lr") == 0.5);
  std::stringstream file;
  torch::save(optimizer, file);
  for (const TestType* each : {&optimizer, &exported}) {  // who only looks changes nothing
    CHECK(dynamic_cast<const TorchOptions*>(&each->param_groups()[1].options()) != nullptr);
  }
  torch::load(restored, file);
  CHECK(options_of(restored, 0).lr() == 0.25);
  CHECK(options_of(restored, 1) == OptionsOf<TestType>(TorchOptions(0.5).betas({0.1, 0.2}).amsgrad(true)));
}

TEMPLATE_TEST_CASE("options of a foreign optimizer are refused", "[fused_adam]", FusedAdam, FusedAdamW) {
  using Foreign = std::conditional_t<kIsDecoupled<TestType>, FusedAdamOptions, FusedAdamWOptions>;
  const auto parameters = random_parameters({{2}, {3}}, at::kDouble);
  TestType optimizer({parameters[0]});
  set_random_gradients(parameters);
  const auto group = [&](auto options) {
    return Group({parameters[1]}, std::make_unique<decltype(options)>(options));
  };
  CHECK(unless_refused(optimizer, {},
                       [&] { optimizer.add_param_group(group(torch::optim::SGDOptions(0.1))); }) == "");
  CHECK(unless_refused(optimizer, {}, [&] { optimizer.add_param_group(group(Foreign(0.1))); }) == "");
  CHECK(refusal([&] { TestType({group(torch::optim::SGDOptions(0.1))}); })[0] != '<');

  optimizer.param_groups()[0].set_options(std::make_unique<torch::optim::SGDOptions>(0.1));
  const Tensor before = copy_of(parameters[0]);
  CHECK(refusal([&] { optimizer.step(); })[0] != '<');
  CHECK(same_bits(before, parameters[0]));
  CHECK(optimizer.state().empty());
}

// Two models alike, trained alike.
template <class Optimizer, class Other>
double distance_after(int steps, const std::vector<Tensor>& ours, Optimizer& optimizer,
                      const std::vector<Tensor>& theirs, Other& other) {
  for (int step = 0; step < steps; ++step) {
    set_random_gradients(ours, theirs);
    if (step % 3 == 2) {  // one sits out
      ours.back().mutable_grad() = Tensor();
      theirs.back().mutable_grad() = Tensor();
    }
    optimizer.step();
    other.step();
  }
  return distance(ours, theirs);
}

TEMPLATE_TEST_CASE("an archive that torch saved continues as torch would, and the other way round",
                   "[fused_adam]", FusedAdam, FusedAdamW) {
  using Peer = PeerOf<TestType>;
  torch::manual_seed(12);
  for (const bool amsgrad : {false, true}) {
    auto ours = random_parameters({{3, 2}, {}, {5}, {4}}, at::kDouble);
    auto theirs = clones(ours);
    const auto make = [&](auto* type, const std::vector<Tensor>& parameters, double rate) {
      using Optimizer = std::remove_pointer_t<decltype(type)>;
      auto options = OptionsOf<Optimizer>(rate).weight_decay(0.2).amsgrad(amsgrad);
      return Optimizer({Group({parameters[0], parameters[1]}),
                        Group({parameters[2], parameters[3]},
                              std::make_unique<OptionsOf<Optimizer>>(options.lr(2 * rate)))},
                       OptionsOf<Optimizer>(rate).betas({0.7, 0.8}).amsgrad(amsgrad));
    };
    auto peer = make(static_cast<Peer*>(nullptr), theirs, 0.01);
    auto twin = make(static_cast<Peer*>(nullptr), ours, 0.01);
    // The last parameter has no gradient, and so no state, before the archive is written.
    REQUIRE(distance_after(5, {ours[0], ours[1], ours[2]}, twin, {theirs[0], theirs[1], theirs[2]}, peer) ==
            0);

    std::stringstream from_torch;
    torch::save(twin, from_torch);
    auto optimizer = make(static_cast<TestType*>(nullptr), ours, 0.5);
    torch::load(optimizer, from_torch);
    CHECK(options_of(optimizer, 0).lr() == 0.01);
    CHECK(options_of(optimizer, 0).betas() == std::make_tuple(0.7, 0.8));
    CHECK(options_of(optimizer, 1).lr() == 0.02);
    CHECK(options_of(optimizer, 1).weight_decay() == 0.2);
    CHECK(distance_after(7, ours, optimizer, theirs, peer) <= 1e-14);

    std::stringstream from_ours;
    torch::save(optimizer, from_ours);
    auto back = make(static_cast<Peer*>(nullptr), ours, 0.5);
    torch::load(back, from_ours);
    CHECK(distance_after(5, ours, back, theirs, peer) <= 1e-14);
  }
}

TEMPLATE_TEST_CASE("take_over continues a running torch optimizer and shares nothing with it", "[fused_adam]",
                   FusedAdam, FusedAdamW) {
  using Peer = PeerOf<TestType>;
  torch::manual_seed(13);
  auto ours = random_parameters({{3, 2}, {5}, {6}}, at::kDouble);
  auto theirs = clones(ours);
  const auto options = OptionsOf<Peer>(0.02).betas({0.6, 0.7}).weight_decay(0.1).amsgrad(true);
  Peer twin(ours, options), peer(theirs, options);
  REQUIRE(distance_after(5, ours, twin, theirs, peer) == 0);

  TestType optimizer(ours);
  optimizer.take_over(twin);
  const auto before = snapshot(twin);
  CHECK(options_of(optimizer) == OptionsOf<TestType>(options));
  CHECK(state_of(optimizer, ours[2]).step() == 4);
  CHECK(distance_after(6, ours, optimizer, theirs, peer) <= 1e-14);
  const auto after = snapshot(twin);
  for (size_t i = 0; i < ours.size(); ++i) {
    CHECK(same_bits(before.parameters[i].state, after.parameters[i].state));
    CHECK(before.parameters[i].step == after.parameters[i].step);
  }

  auto other = clones(ours);
  TestType elsewhere(other), too_few({ours[0], ours[1]}),
      two_groups({Group({ours[0], ours[1]}), Group({ours[2]})});
  CHECK(unless_refused(elsewhere, {"parameter 0 of group 0"}, [&] { elsewhere.take_over(twin); }) == "");
  CHECK(unless_refused(too_few, {"3", "2"}, [&] { too_few.take_over(twin); }) == "");
  CHECK(unless_refused(two_groups, {"1", "2"}, [&] { two_groups.take_over(twin); }) == "");

  Peer more_groups({Group({ours[0], ours[1]}), Group({ours[2]})});
  CHECK(unless_refused(too_few, {"2", "1"}, [&] { too_few.take_over(more_groups); }) == "");
}

TEST_CASE("take_over keeps the moments of a bf16 model and rounds them no more", "[fused_adam]") {
  torch::manual_seed(14);
  auto parameters = random_parameters({{30}}, at::kBFloat16);
  torch::optim::AdamW twin(parameters, torch::optim::AdamWOptions(0.01).betas({0.5, 0.75}));
  set_random_gradients(parameters);
  twin.step();
  FusedAdamW optimizer(parameters);
  optimizer.take_over(twin);
  const Tensor before = state_of(twin, parameters[0]).exp_avg().to(at::kFloat);
  set_random_gradients(parameters);
  optimizer.step();
  const auto& state = state_of(optimizer, parameters[0]);
  CHECK(state.step() == 2);
  CHECK(state.remainder().defined());
  CHECK(state.exp_avg().scalar_type() == at::kFloat);
  CHECK(state.exp_avg().equal(0.5 * before + 0.5 * parameters[0].grad().to(at::kFloat)));
}

}  // namespace
}  // namespace pacer::testing
