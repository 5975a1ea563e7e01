// FusedSgd as an optimizer of a training loop: its options, and its state in archives, by name, and beside torch::optim::SGD's.
#include "support/catch.h"

#include <cmath>
#include <limits>

#include <torch/nn/modules/linear.h>

#include <pacer/hooks/detail/torch_optimizer_state.h>

#include "support/checkpoints/archives.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/twins.h"

namespace pacer::testing::fused_sgd_state {
namespace {

using Group = torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

// Every option away from its default, so that losing one shows.
FusedSgdOptions rich_options(const Mode& mode) {
  return with_mode(FusedSgdOptions(0.02)
                       .initial_lr(0.03)
                       .momentum(0.8)
                       .dampening(0.25)
                       .weight_decay(0.05)
                       .maximize(true)
                       .finite_check(true)
                       .seed(0xfedcba9876543210ull),
                   mode);
}

// Three groups: with dampening, with Nesterov's momentum, and without a momentum; parameters of unequal step counts.
struct Run {
  std::vector<Tensor> parameters;
  FusedSgd optimizer;

  Run(const std::vector<Tensor>& values, const FusedSgdOptions& options)
      : parameters(clones(values)), optimizer(groups_of(parameters, options)) {}

  static std::vector<NamedParamGroup> groups_of(const std::vector<Tensor>& p,
                                                const FusedSgdOptions& options) {
    NamedParameters first, second, third;
    first.insert("encoder.weight", p[0]);
    first.insert("encoder.bias", p[1]);
    second.insert("head.weight", p[2]);
    third.insert("head.bias", p[3]);
    const auto of = [](const FusedSgdOptions& own) { return std::make_unique<FusedSgdOptions>(own); };
    std::vector<NamedParamGroup> groups;
    groups.emplace_back(first, of(options));
    groups.emplace_back(second, of(FusedSgdOptions(options).momentum(0.5).dampening(0).nesterov(true)));
    groups.emplace_back(third, of(FusedSgdOptions(options).momentum(0)));
    return groups;
  }
  void step(int steps, uint64_t seed) {
    torch::manual_seed(seed);
    for (int i = 0; i < steps; ++i) {
      set_random_gradients(parameters);
      if (i == 1) parameters[1].mutable_grad() = Tensor();
      optimizer.step();
    }
  }
};

std::vector<Tensor> some_values(at::ScalarType dtype) {
  return random_parameters({{40, 30}, {129}, {6}, {50}}, dtype);
}

int64_t bytes_of_state(FusedSgd& optimizer, const Tensor& parameter) {
  const auto& state = state_of(optimizer, parameter);
  int64_t bytes = 0;
  for (const Tensor& tensor : {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(), state.master(),
                               state.remainder(), state.trust_average(), state.row_moment()}) {
    if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

}  // namespace

TEST_CASE("a FusedSgd that was saved and loaded goes on to the bit, in every mode", "[fused_sgd]") {
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(11);
    Run run(some_values(mode.dtype), rich_options(mode));
    run.step(4, 1);
    Run by_archive(run.parameters, FusedSgdOptions(0.9)), by_name(run.parameters, FusedSgdOptions(0.9));
    Run cold(run.parameters, rich_options(mode));
    load_from(by_archive.optimizer, saved(run.optimizer));
    by_name.optimizer.import_state(run.optimizer.export_state());
    CHECK(state_of(by_name.optimizer, by_name.parameters[1]).step() == 3);
    for (Run* each : {&run, &by_archive, &by_name, &cold}) each->step(3, 2);
    CHECK(difference(snapshot(run.optimizer), snapshot(by_archive.optimizer)) == "");
    CHECK(difference(snapshot(run.optimizer), snapshot(by_name.optimizer)) == "");
    CHECK_FALSE(same_bits(run.parameters, cold.parameters));
  }
}

TEST_CASE("R3: every entry of a FusedSgd archive matters, but the step count that torch's lacks, too",
          "[fused_sgd]") {
  for (const Mode& mode : {all_modes()[1], all_modes()[2]}) {
    torch::manual_seed(12);
    Run run(some_values(mode.dtype), rich_options(mode));
    run.step(3, 1);
    const std::string archive = saved(run.optimizer);
    Run expected(run.parameters, FusedSgdOptions(0.9));
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
        Run other(run.parameters, FusedSgdOptions(0.9));
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

TEST_CASE("without a momentum there is no state at all, and with one a buffer", "[fused_sgd]") {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const std::vector<Tensor> p = random_parameters({{100}}, dtype);
    FusedSgd plain(p, 0.1), with_momentum(p, FusedSgdOptions(0.1).momentum(0.9));
    set_random_gradients(p);
    plain.step();
    with_momentum.step();
    CHECK(bytes_of_state(plain, p[0]) == 0);
    CHECK(bytes_of_state(with_momentum, p[0]) == 100 * static_cast<int64_t>(p[0].element_size()));
  }
}

TEST_CASE("a momentum that is set later begins with the next gradient, as torch's", "[fused_sgd]") {
  torch::manual_seed(3);
  Twins<FusedSgd> twins(random_parameters({{30}, {4, 4}}, at::kDouble), SGDOptions(0.1));
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

TEST_CASE("a skipped step changes nothing, and the next one is still the first", "[fused_sgd]") {
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(4);
    Run run(some_values(mode.dtype), rich_options(mode)), calm(run.parameters, rich_options(mode));
    const auto spoiled = [&](double value) {
      set_random_gradients(run.parameters);
      run.parameters[1].grad()[3] = value;
      run.optimizer.step();
    };
    spoiled(std::numeric_limits<double>::quiet_NaN());
    run.step(1, 5);
    spoiled(std::numeric_limits<double>::infinity());
    run.step(2, 6);
    calm.step(1, 5);
    calm.step(2, 6);
    CHECK(run.optimizer.skipped_steps() == 2);
    CHECK(same_bits(run.parameters, calm.parameters));
    CHECK(same_bits(state_of(run.optimizer, run.parameters[0]).momentum_buffer(),
                    state_of(calm.optimizer, calm.parameters[0]).momentum_buffer()));
  }
}

TEST_CASE("torch's SGD is taken over, its archives load, and FusedSgd's load into torch's", "[fused_sgd]") {
  const SGDOptions options = SGDOptions(0.1).momentum(0.9).dampening(0.2).weight_decay(0.01);
  torch::manual_seed(6);
  Twins<FusedSgd> twins(random_parameters({{20}, {3, 5}}, at::kDouble), options);
  twins.step_with_random_gradients();
  for (int step = 0; step < 2; ++step) {
    set_random_gradients(twins.ours, twins.theirs);
    twins.clear_gradient(1);
    twins.step();
  }
  const std::vector<Tensor> by_archive = clones(twins.theirs), back = clones(twins.ours);
  FusedSgd taken(twins.theirs, 0.5), loaded(by_archive, 0.5);
  taken.take_over(twins.peer);
  load_from(loaded, saved(twins.peer));
  torch::optim::SGD returned(back, SGDOptions(0.5));
  load_from(returned, saved(twins.optimizer));
  CHECK((options_of(taken) == FusedSgdOptions(options) && options_of(loaded) == FusedSgdOptions(options)));
  CHECK(options_of(returned).dampening() == 0.2);
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
  CHECK(distance(twins.ours, twins.theirs) <= 1e-14);
  CHECK(distance(twins.ours, by_archive) <= 1e-14);
  CHECK(distance(twins.ours, back) <= 1e-14);
}

TEST_CASE("what a Session saved of torch's SGD is FusedSgd's own state", "[fused_sgd]") {
  torch::manual_seed(7);
  const torch::nn::Linear model(4, 3), other(4, 3);
  torch::optim::SGD theirs(model->parameters(), SGDOptions(0.1).momentum(0.9).nesterov(true));
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
  FusedSgd own(other->named_parameters(), 0.5);
  own.import_state(state);
  for (int step = 0; step < 3; ++step) {
    set_random_gradients(model->parameters(), other->parameters());
    theirs.step();
    own.step();
  }
  CHECK(distance(model->parameters(), other->parameters()) <= 1e-6);
  CHECK(options_of(own).nesterov());
  NamedTensors damaged = state;
  damaged.erase("weight/momentum_buffer");
  CHECK(unless_refused(own, {"weight/momentum_buffer"}, [&] { own.import_state(damaged); }) == "");
  FusedAdamW adamw(other->named_parameters());
  CHECK(unless_refused(adamw, {"saved by torch::optim::SGD", "FusedSgd, which takes its state over"},
                       [&] { adamw.import_state(state); }) == "");
  CHECK(unless_refused(adamw, {"saved by FusedSgd"}, [&] { load_from(adamw, saved(own)); }) == "");
}

TEST_CASE("a state and options of torch's type among FusedSgd's become its own", "[fused_sgd]") {
  const std::vector<Tensor> p = random_parameters({{4}}, at::kDouble);
  const SGDOptions options = SGDOptions(0.5).momentum(0.5);
  FusedSgd optimizer({Group({p[0]}, std::make_unique<SGDOptions>(options))});
  auto state = std::make_unique<torch::optim::SGDParamState>();
  const Tensor buffer = torch::full({4}, 2.0, at::kDouble);
  state->momentum_buffer(buffer);
  optimizer.state()[p[0].unsafeGetTensorImpl()] = std::move(state);
  p[0].mutable_grad() = torch::ones({4}, at::kDouble);
  const Tensor before = p[0].detach().clone();
  optimizer.step();
  CHECK(distance(before - p[0].detach(), torch::ones({4}, at::kDouble)) <= 1e-15);  // 0.5 * (0.5 * 2 + 1)
  CHECK(state_of(optimizer, p[0]).momentum_buffer().is_same(buffer));
  // As programs write it that were made for torch's.
  static_cast<SGDOptions&>(optimizer.param_groups()[0].options()).lr(0.25).weight_decay(0.125).nesterov(true);
  CHECK(options_of(optimizer) == FusedSgdOptions(0.25).momentum(0.5).weight_decay(0.125).nesterov(true));
}

TEST_CASE("a bad option of FusedSgd is refused by name, value and range", "[fused_sgd]") {
  struct BadOption {
    void (*apply)(FusedSgdOptions&);
    std::vector<std::string> parts;
  };
  const std::vector<BadOption> all = {
      {[](auto& o) { o.lr(-0.125); }, {"FusedSgd", "lr", "-0.125", ">= 0"}},
      {[](auto& o) { o.momentum(1); }, {"FusedSgd", "momentum", "1", "[0, 1)"}},
      {[](auto& o) { o.momentum(std::nan("")); }, {"momentum", "nan"}},
      {[](auto& o) { o.dampening(-0.5); }, {"dampening", "-0.5", "[0, 1)"}},
      {[](auto& o) { o.weight_decay(HUGE_VAL); }, {"weight_decay", "inf"}},
      {[](auto& o) { o.nesterov(true); }, {"Nesterov", "momentum above 0", "not 0 and 0"}},
      {[](auto& o) { o.nesterov(true).momentum(0.5).dampening(0.25); }, {"Nesterov", "0.5 and 0.25"}},
      {[](auto& o) { o.rounding(Rounding::stochastic); }, {"stochastic", "master"}},
      {[](auto& o) { o.paged(Paging()); }, {"no buffer that could be paged"}},
  };
  for (const BadOption& bad : all) {
    CAPTURE(bad.parts);
    FusedSgdOptions options(0.1);
    bad.apply(options);
    const auto parameters = random_parameters({{2}, {3}}, at::kFloat);
    for (const auto& part : bad.parts) {
      CHECK(contains(refusal([&] { FusedSgd(parameters, options); }), part));
    }
    FusedSgd optimizer({parameters[0]}, FusedSgdOptions(0.1));
    CHECK(unless_refused(optimizer, bad.parts, [&] {
            optimizer.add_param_group(Group({parameters[1]}, std::make_unique<FusedSgdOptions>(options)));
          }) == "");
  }
  const auto parameters = random_parameters({{2}, {3}}, at::kFloat);
  const auto of_adam = [&] { return Group({parameters[0]}, std::make_unique<FusedAdamOptions>()); };
  CHECK(contains(refusal([&] { FusedSgd({of_adam()}); }), "FusedSgdOptions"));
}

TEST_CASE("options of FusedSgd are equal where every field is", "[fused_sgd]") {
  using Options = FusedSgdOptions;
  void (*const changes[])(Options&) = {
      [](Options& o) { o.lr(0.5); },
      [](Options& o) { o.initial_lr(0.5); },
      [](Options& o) { o.momentum(0.5); },
      [](Options& o) { o.dampening(0.5); },
      [](Options& o) { o.weight_decay(0.5); },
      [](Options& o) { o.nesterov(true); },
      [](Options& o) { o.maximize(true); },
      [](Options& o) { o.finite_check(true); },
      [](Options& o) { o.master_weights(MasterWeights::fp32); },
      [](Options& o) { o.rounding(Rounding::stochastic); },
      [](Options& o) { o.seed(5); },
  };
  CHECK(Options() == Options(1e-3));
  for (const auto change : changes) {
    Options changed, same;
    change(changed);
    change(same);
    CHECK_FALSE(changed == Options());
    CHECK(changed == same);
  }
}

}  // namespace pacer::testing::fused_sgd_state
