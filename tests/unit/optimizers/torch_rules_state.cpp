// FusedSgd and FusedRmsprop as optimizers of a training loop: their options, and their state in archives, by name, and beside
// that of torch's.
#include "support/catch.h"

#include <limits>

#include <torch/nn/modules/linear.h>

#include <pacer/hooks/detail/torch_optimizer_state.h>

#include "support/checkpoints/archives.h"
#include "support/optimizers/torch_rules.h"

namespace pacer::testing::torch_rules_state {
namespace {

using Group = torch::optim::OptimizerParamGroup;

// The options of all optimizers away from their defaults, too.
template <class Optimizer>
OptionsOf<Optimizer> rich_options(const Mode& mode) {
  const auto rich = TorchRule<Optimizer>::rich().initial_lr(0.03).finite_check(true);
  return with_mode(OptionsOf<Optimizer>(rich).seed(0xfedcba9876543210ull), mode);
}

// A group for each kind, and parameters of unequal step counts.
template <class Optimizer>
struct Run {
  std::vector<Tensor> parameters;
  Optimizer optimizer;

  Run(const std::vector<Tensor>& values, const OptionsOf<Optimizer>& options)
      : parameters(clones(values)), optimizer(groups_of(parameters, options)) {}

  static std::vector<NamedParamGroup> groups_of(const std::vector<Tensor>& p,
                                                const OptionsOf<Optimizer>& options) {
    const auto kinds = TorchRule<Optimizer>::kinds_of(options);
    std::vector<NamedParamGroup> groups;
    for (size_t g = 0; g < kinds.size(); ++g) {
      NamedParameters own;
      if (g == 0) own.insert("bias", p[0]);
      own.insert("weight" + std::to_string(g), p[g + 1]);
      groups.emplace_back(own, std::make_unique<OptionsOf<Optimizer>>(kinds[g]));
    }
    return groups;
  }
  void step(int steps, uint64_t seed) {
    torch::manual_seed(seed);
    for (int i = 0; i < steps; ++i) {
      set_random_gradients(parameters);
      if (i == 1) parameters[0].mutable_grad() = Tensor();
      optimizer.step();
    }
  }
};

std::vector<Tensor> some_values(at::ScalarType dtype) {
  return random_parameters({{129}, {40, 30}, {6}, {50}, {2, 7}}, dtype);
}

template <class Optimizer>
int64_t bytes_of_state(Optimizer& optimizer, const Tensor& parameter) {
  const auto& state = state_of(optimizer, parameter);
  int64_t bytes = 0;
  for (const Tensor& tensor : {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(), state.master(),
                               state.remainder(), state.trust_average(), state.row_moment()}) {
    if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

}  // namespace

TEMPLATE_TEST_CASE(
    "an optimizer with a rule of torch's that was saved and loaded goes on to the bit, in every mode",
    "[torch_rules]", FusedSgd, FusedRmsprop) {
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(11);
    Run<TestType> run(some_values(mode.dtype), rich_options<TestType>(mode));
    run.step(4, 1);
    Run<TestType> by_archive(run.parameters, 0.9), by_name(run.parameters, 0.9);
    Run<TestType> cold(run.parameters, rich_options<TestType>(mode));
    load_from(by_archive.optimizer, saved(run.optimizer));
    by_name.optimizer.import_state(run.optimizer.export_state());
    CHECK(state_of(by_name.optimizer, by_name.parameters[0]).step() == 3);
    for (Run<TestType>* each : {&run, &by_archive, &by_name, &cold}) each->step(3, 2);
    CHECK(difference(snapshot(run.optimizer), snapshot(by_archive.optimizer)) == "");
    CHECK(difference(snapshot(run.optimizer), snapshot(by_name.optimizer)) == "");
    CHECK_FALSE(same_bits(run.parameters, cold.parameters));
  }
}

TEMPLATE_TEST_CASE("R3: every entry of an archive matters, also a step count that torch's lacks",
                   "[torch_rules]", FusedSgd, FusedRmsprop) {
  for (const Mode& mode : {all_modes()[1], all_modes()[2]}) {
    torch::manual_seed(12);
    Run<TestType> run(some_values(mode.dtype), rich_options<TestType>(mode));
    run.step(3, 1);
    const std::string archive = saved(run.optimizer);
    Run<TestType> expected(run.parameters, 0.9);
    load_from(expected.optimizer, archive);
    expected.step(2, 2);
    const auto after = snapshot(expected.optimizer);  // options are part of it
    for (const ArchiveEntry& entry : entries_of(archive)) {
      // Of pytorch_version and state_version see fused_lamb_state.cpp.
      if (entry.path == "pytorch_version" || contains(entry.path, "state_version")) continue;
      CAPTURE(mode.name, entry.path);
      std::vector<std::string> damaged = {without(archive, entry.path)};
      if (!entry.is_folder) damaged.push_back(with_altered(archive, entry.path));
      for (const std::string& text : damaged) {
        Run<TestType> other(run.parameters, 0.9);
        const auto before = snapshot(other.optimizer);
        const std::string message = refusal([&] { load_from(other.optimizer, text); });
        if (message == "<no exception>") {
          other.step(2, 2);
          CHECK(difference(snapshot(other.optimizer), after) != "");
        } else {
          CHECK(message.size() > 20);
          CHECK(difference(before, snapshot(other.optimizer)) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("a state has the tensors that its options need, and no others", "[torch_rules]", FusedSgd,
                   FusedRmsprop) {
  using Rule = TorchRule<TestType>;
  for (const auto& options : Rule::kinds_of(Rule::rich())) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const std::vector<Tensor> p = random_parameters({{100}}, dtype);
      TestType optimizer(p, options);
      set_random_gradients(p);
      optimizer.step();
      CHECK(bytes_of_state(optimizer, p[0]) ==
            100 * static_cast<int64_t>(p[0].element_size()) * Rule::tensors(options));
    }
  }
}

TEST_CASE("a momentum that is set later begins with the next gradient, as torch's", "[torch_rules]") {
  torch::manual_seed(3);
  Twins<FusedSgd> twins(random_parameters({{30}, {4, 4}}, at::kDouble), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) twins.step_with_random_gradients();
  options_of(twins.optimizer).momentum(0.9).dampening(0.5);
  options_of(twins.peer).momentum(0.9).dampening(0.5);
  // Saved in between, the buffer is still to come.
  FusedSgd other(twins.ours, 0.1);
  other.import_state(twins.optimizer.export_state());
  twins.step_with_random_gradients();
  CHECK(same_bits(state_of(twins.optimizer, twins.ours[0]).momentum_buffer(), twins.ours[0].grad()));
  const std::vector<Tensor> before = clones(twins.ours);
  other.step();
  CHECK(same_bits(state_of(other, twins.ours[0]).momentum_buffer(), twins.ours[0].grad()));
  for (size_t i = 0; i < before.size(); ++i) twins.ours[i].data().copy_(before[i].detach());
  for (int step = 0; step < 3; ++step) twins.step_with_random_gradients();
  CHECK(twins.apart() <= 1e-14);
  // Without one the buffer is let go.
  options_of(twins.optimizer).momentum(0).dampening(0);
  twins.optimizer.step();
  CHECK(bytes_of_state(twins.optimizer, twins.ours[0]) == 0);
}

TEST_CASE("a momentum and a mean of gradients that RMSprop gets later begin at zero", "[torch_rules]") {
  torch::manual_seed(3);
  Twins<FusedRmsprop> twins(random_parameters({{30}, {4, 4}}, at::kDouble),
                            torch::optim::RMSpropOptions(0.1));
  for (int step = 0; step < 3; ++step) twins.step_with_random_gradients();
  options_of(twins.optimizer).momentum(0.9).centered(true);
  options_of(twins.peer).momentum(0.9).centered(true);
  for (const Tensor& p : twins.theirs) {  // torch's makes its tensors in the first step or never
    auto& state = state_of(twins.peer, p);
    state.momentum_buffer(torch::zeros_like(p.detach())).grad_avg(torch::zeros_like(p.detach()));
  }
  for (int step = 0; step < 3; ++step) twins.step_with_random_gradients();
  CHECK(twins.apart() <= 1e-13);
  options_of(twins.optimizer).momentum(0);
  twins.optimizer.step();
  CHECK_FALSE(state_of(twins.optimizer, twins.ours[0]).momentum_buffer().defined());
}

TEMPLATE_TEST_CASE("a skipped step changes nothing, and the next one is still the first", "[torch_rules]",
                   FusedSgd, FusedRmsprop) {
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(4);
    Run<TestType> run(some_values(mode.dtype), rich_options<TestType>(mode));
    Run<TestType> calm(run.parameters, rich_options<TestType>(mode));
    const auto spoiled = [&](double value) {
      set_random_gradients(run.parameters);
      run.parameters[0].grad()[3] = value;
      run.optimizer.step();
    };
    spoiled(std::numeric_limits<double>::quiet_NaN());
    run.step(1, 5);
    spoiled(std::numeric_limits<double>::infinity());
    run.step(2, 6);
    calm.step(1, 5);
    calm.step(2, 6);
    CHECK(run.optimizer.skipped_steps() == 2);
    CHECK(difference(snapshot(run.optimizer), snapshot(calm.optimizer)) == "");
  }
}

TEMPLATE_TEST_CASE(
    "torch's optimizer is taken over, its archives load, and those of its peer load into torch's",
    "[torch_rules]", FusedSgd, FusedRmsprop) {
  const auto options = TorchRule<TestType>::of_torch();
  torch::manual_seed(6);
  Twins<TestType> twins(random_parameters({{20}, {3, 5}}, at::kDouble), options);
  twins.step_with_random_gradients();
  for (int step = 0; step < 2; ++step) {
    set_random_gradients(twins.ours, twins.theirs);
    twins.clear_gradient(1);
    twins.step();
  }
  const std::vector<Tensor> by_archive = clones(twins.theirs), back = clones(twins.ours);
  TestType taken(twins.theirs, 0.5), loaded(by_archive, 0.5);
  taken.take_over(twins.peer);
  load_from(loaded, saved(twins.peer));
  PeerOf<TestType> returned(back, OptionsOf<PeerOf<TestType>>(0.5));
  load_from(returned, saved(twins.optimizer));
  CHECK((options_of(taken) == OptionsOf<TestType>(options) && options_of(loaded) == options_of(taken)));
  CHECK((options_of(returned) == options));
  // `taken` steps the parameters that torch's has, which so must come before torch's own step.
  for (int step = 0; step < 3; ++step) {
    set_random_gradients(twins.ours, by_archive);
    for (size_t i = 0; i < back.size(); ++i) {
      back[i].mutable_grad() = twins.ours[i].grad();
      twins.theirs[i].mutable_grad() = twins.ours[i].grad();
    }
    twins.optimizer.step();
    taken.step();
    loaded.step();
    returned.step();
  }
  CHECK(distance(twins.ours, twins.theirs) <= 1e-13);
  CHECK(distance(twins.ours, by_archive) <= 1e-13);
  CHECK(distance(twins.ours, back) <= 1e-13);
}

TEMPLATE_TEST_CASE("what a Session saved of torch's optimizer is its peer's own state", "[torch_rules]",
                   FusedSgd, FusedRmsprop) {
  using Rule = TorchRule<TestType>;
  for (const bool has_momentum : {true, false}) {
    CAPTURE(has_momentum);
    torch::manual_seed(7);
    const torch::nn::Linear model(4, 3), other(4, 3);
    const auto options = Rule::of_torch().momentum(has_momentum ? 0.9 : 0);
    PeerOf<TestType> theirs(model->parameters(), options);
    for (int step = 0; step < 2; ++step) {
      set_random_gradients(model->parameters());
      model->bias.mutable_grad() = Tensor();
      theirs.step();
    }
    const NamedTensors state = detail::export_torch_state(theirs, *model);
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < 2; ++i) other->parameters()[i].copy_(model->parameters()[i]);
    }
    TestType own(other->named_parameters(), 0.5);
    own.import_state(state);
    for (int step = 0; step < 3; ++step) {
      set_random_gradients(model->parameters(), other->parameters());
      theirs.step();
      own.step();
    }
    CHECK(distance(model->parameters(), other->parameters()) <= 1e-5);
    CHECK((options_of(own) == OptionsOf<TestType>(options)));
    FusedAdamW adamw(other->named_parameters());
    const std::string offer = std::string(Rule::kName) + ", which takes its state over";
    CHECK(unless_refused(adamw, {std::string("saved by ") + Rule::kNameInTorch, offer},
                         [&] { adamw.import_state(state); }) == "");
    CHECK(unless_refused(adamw, {std::string("saved by ") + Rule::kName},
                         [&] { load_from(adamw, saved(own)); }) == "");
    if (!has_momentum) continue;
    NamedTensors damaged = state;
    damaged.erase("weight/momentum_buffer");
    CHECK(unless_refused(own, {"weight/momentum_buffer"}, [&] { own.import_state(damaged); }) == "");
  }
}

TEMPLATE_TEST_CASE("a state and options of torch's type among the optimizer's become its own",
                   "[torch_rules]", FusedSgd, FusedRmsprop) {
  using TorchOptions = OptionsOf<PeerOf<TestType>>;
  using TorchState = ParamStateOf<PeerOf<TestType>>;
  const std::vector<Tensor> theirs = random_parameters({{4}}, at::kDouble), p = clones(theirs);
  const auto options = TorchRule<TestType>::of_torch();
  PeerOf<TestType> peer(theirs, options);
  set_random_gradients(theirs, p);
  peer.step();
  for (size_t i = 0; i < p.size(); ++i) p[i].data().copy_(theirs[i].detach());
  TestType optimizer({Group({p[0]}, std::make_unique<TorchOptions>(options))});
  auto state = std::make_unique<TorchState>(state_of(peer, theirs[0]));
  const Tensor buffer = state->momentum_buffer().clone();
  state->momentum_buffer(buffer);
  if constexpr (std::is_same_v<TestType, FusedRmsprop>) {
    state->square_avg(state->square_avg().clone()).grad_avg(state->grad_avg().clone());
  }
  optimizer.state()[p[0].unsafeGetTensorImpl()] = std::move(state);
  for (int step = 0; step < 2; ++step) {
    set_random_gradients(theirs, p);
    optimizer.step();
    peer.step();
  }
  CHECK(distance(p, theirs) <= 1e-13);
  CHECK(state_of(optimizer, p[0]).momentum_buffer().is_same(buffer));
  // As programs write it that were made for torch's.
  static_cast<TorchOptions&>(optimizer.param_groups()[0].options())
      .lr(0.25)
      .weight_decay(0.125)
      .momentum(0.5);
  CHECK((options_of(optimizer) ==
         OptionsOf<TestType>(TorchOptions(options).lr(0.25).weight_decay(0.125).momentum(0.5))));
}

TEMPLATE_TEST_CASE("a bad option is refused by name, value and range", "[torch_rules]", FusedSgd,
                   FusedRmsprop) {
  using Rule = TorchRule<TestType>;
  using Options = OptionsOf<TestType>;
  auto all = Rule::bad_options();
  all.push_back({[](Options& o) { o.lr(-0.125); }, {Rule::kName, "lr", "-0.125", ">= 0"}});
  all.push_back({[](Options& o) { o.weight_decay(HUGE_VAL); }, {"weight_decay", "inf"}});
  all.push_back({[](Options& o) { o.rounding(Rounding::stochastic); }, {"stochastic", "master"}});
  for (const auto& bad : all) {
    CAPTURE(bad.parts);
    Options options(0.1);
    bad.apply(options);
    const auto parameters = random_parameters({{2}, {3}}, at::kFloat);
    for (const auto& part : bad.parts) {
      CHECK(contains(refusal([&] { TestType(parameters, options); }), part));
    }
    TestType optimizer({parameters[0]}, Options(0.1));
    CHECK(unless_refused(optimizer, bad.parts, [&] {
            optimizer.add_param_group(Group({parameters[1]}, std::make_unique<Options>(options)));
          }) == "");
  }
  const auto parameters = random_parameters({{2}, {3}}, at::kFloat);
  const auto of_adam = [&] { return Group({parameters[0]}, std::make_unique<FusedAdamOptions>()); };
  CHECK(contains(refusal([&] { TestType({of_adam()}); }), std::string(Rule::kName) + "Options"));
}

}  // namespace pacer::testing::torch_rules_state
