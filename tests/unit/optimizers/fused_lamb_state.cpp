// FusedLamb as an optimizer of a training loop: its state in archives and by name, steps that change nothing.
// What it shares with FusedAdamW is tested there; here is what it has of its own.
#include "support/catch.h"

#include <limits>

#include "support/checkpoints/archives.h"
#include "support/kernels/lamb.h"

namespace pacer::testing::lamb {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(),
                 kInf = std::numeric_limits<double>::infinity();

// Every option away from its default, so that losing one shows.
FusedLambOptions rich_options(const Mode& mode) {
  return with_mode(FusedLambOptions(0.02)
                       .initial_lr(0.03)
                       .betas({0.8, 0.95})
                       .eps(1e-4)
                       .weight_decay(0.05)
                       .bias_correction(false)
                       .min_coeff(0.4)
                       .max_coeff(0.9)
                       .finite_check(true)
                       .seed(0xfedcba9876543210ull),
                   mode);
}

// Two groups, the second without adaptation; parameters with unequal step counts.
struct Run {
  std::vector<Tensor> parameters;
  FusedLamb optimizer;

  Run(const std::vector<Tensor>& values, const FusedLambOptions& options)
      : parameters(clones(values)), optimizer(groups_of(parameters, options)) {}

  static std::vector<NamedParamGroup> groups_of(const std::vector<Tensor>& p,
                                                const FusedLambOptions& options) {
    NamedParameters first, second;
    first.insert("encoder.weight", p[0]);
    first.insert("encoder.bias", p[1]);
    second.insert("norm.weight", p[2]);
    std::vector<NamedParamGroup> groups;
    groups.emplace_back(first, std::make_unique<FusedLambOptions>(options));
    groups.emplace_back(second, std::make_unique<FusedLambOptions>(FusedLambOptions(options).adapt(false)));
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
  return random_parameters({{40, 30}, {129}, {6}}, dtype);
}

NamedTensors copied(const NamedTensors& state) {
  NamedTensors copy;
  for (const auto& [name, tensor] : state) copy[name] = tensor.detach().clone();
  return copy;
}

}  // namespace

TEST_CASE("a FusedLamb that was saved and loaded goes on to the bit, in every mode", "[fused_lamb]") {
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(11);
    Run run(some_values(mode.dtype), rich_options(mode));
    run.step(4, 1);
    Run by_archive(run.parameters, FusedLambOptions(0.9)), by_name(run.parameters, FusedLambOptions(0.9));
    Run cold(run.parameters, rich_options(mode));
    load_from(by_archive.optimizer, saved(run.optimizer));
    by_name.optimizer.import_state(run.optimizer.export_state());
    CHECK(state_of(by_name.optimizer, by_name.parameters[1]).step() == 3);
    for (Run* each : {&run, &by_archive, &by_name, &cold}) each->step(3, 2);
    CHECK(difference(snapshot(run.optimizer), snapshot(by_archive.optimizer)) == "");
    CHECK(difference(snapshot(run.optimizer), snapshot(by_name.optimizer)) == "");
    CHECK_FALSE(same_bits(run.parameters, cold.parameters));
    CHECK(run.optimizer.trust_ratio(run.parameters[0]) ==
          by_name.optimizer.trust_ratio(by_name.parameters[0]));
  }
}

TEST_CASE("R3: every entry of a FusedLamb archive matters", "[fused_lamb]") {
  for (const Mode& mode : {all_modes()[1], all_modes()[2], all_modes()[5]}) {
    torch::manual_seed(12);
    Run run(some_values(mode.dtype), rich_options(mode));
    run.step(3, 1);
    const std::string archive = saved(run.optimizer);
    Run expected(run.parameters, FusedLambOptions(0.9));
    load_from(expected.optimizer, archive);
    expected.step(2, 2);
    const auto after = snapshot(expected.optimizer);  // options are part of it
    for (const ArchiveEntry& entry : entries_of(archive)) {
      // Written because LibTorch's loader asks for it; all versions we read have the same layout.
      // Without its version a file counts as one of an older version, whose fields are the same here.
      if (entry.path == "pytorch_version" || contains(entry.path, "state_version")) continue;
      CAPTURE(mode.name, entry.path);
      std::vector<std::string> damaged = {without(archive, entry.path)};
      if (!entry.is_folder) damaged.push_back(with_altered(archive, entry.path));
      for (const std::string& text : damaged) {
        Run other(run.parameters, FusedLambOptions(0.9));
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

TEST_CASE("R4: named state is refused where anything is missing, left over or another optimizer's",
          "[fused_lamb]") {
  torch::manual_seed(13);
  Run run(some_values(at::kFloat), rich_options(all_modes()[1]));
  run.step(2, 1);
  const NamedTensors state = copied(run.optimizer.export_state());
  CHECK(state.count("group/0/min_coeff") + state.count("group/1/adapt") == 2);
  CHECK(state.count("group/0/amsgrad") + state.count("encoder.weight/max_exp_avg_sq") == 0);
  Run other(run.parameters, FusedLambOptions(0.9));
  for (const auto& item : state) {
    CAPTURE(item.first);
    NamedTensors damaged = state;
    damaged.erase(item.first);
    if (item.first != "state_version") {  // without it the state counts as one of an older version
      CHECK(unless_refused(other.optimizer, {item.first}, [&] { other.optimizer.import_state(damaged); }) ==
            "");
    }
    damaged = state;
    damaged[item.first + "x"] = item.second;
    CHECK(unless_refused(other.optimizer, {item.first + "x"},
                         [&] { other.optimizer.import_state(damaged); }) == "");
  }
  NamedTensors without = state;  // steps, but no moments
  for (const char* field : {"exp_avg", "exp_avg_sq", "master", "remainder"}) {
    without.erase(std::string("encoder.weight/") + field);
  }
  CHECK(unless_refused(other.optimizer, {"encoder.weight/exp_avg"},
                       [&] { other.optimizer.import_state(without); }) == "");
  NamedTensors bad = state;
  bad["group/1/max_coeff"] = number_tensor(0.1);
  CHECK(unless_refused(other.optimizer, {"max_coeff", "0.1"}, [&] { other.optimizer.import_state(bad); }) ==
        "");

  const auto parameters = clones(run.parameters);
  FusedAdamW adam(parameters);
  set_random_gradients(parameters);
  adam.step();
  FusedLamb lamb(parameters);
  const std::string of_adam = "saved by FusedAdamW, but this is FusedLamb";
  CHECK(unless_refused(lamb, {of_adam}, [&] { lamb.import_state(adam.export_state()); }) == "");
  CHECK(unless_refused(lamb, {of_adam}, [&] { load_from(lamb, saved(adam)); }) == "");
  set_random_gradients(parameters);
  lamb.step();
  CHECK(unless_refused(adam, {"saved by FusedLamb"}, [&] { load_from(adam, saved(lamb)); }) == "");
}

TEST_CASE("N2: a non-finite gradient changes nothing in FusedLamb, the trust ratio included",
          "[fused_lamb]") {
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(14);
    Run run(some_values(mode.dtype), with_mode(FusedLambOptions(0.01).finite_check(true), mode));
    Run calm(run.parameters, with_mode(FusedLambOptions(0.01).finite_check(true), mode));
    run.step(2, 1);
    calm.step(2, 1);
    int64_t skipped = 0;
    for (const double bad : {kNaN, kInf, -kInf}) {
      set_random_gradients(run.parameters);
      run.parameters[1].mutable_grad()[128] = bad;
      const auto before = snapshot(run.optimizer);
      const double ratio = run.optimizer.trust_ratio(run.parameters[0]);
      run.optimizer.step();
      CHECK(difference(before, snapshot(run.optimizer)) == "");
      CHECK(run.optimizer.trust_ratio(run.parameters[0]) == ratio);
      CHECK(run.optimizer.skipped_steps() == ++skipped);
    }
    run.step(2, 2);
    calm.step(2, 2);
    CHECK(difference(snapshot(run.optimizer), snapshot(calm.optimizer)) == "");
  }
}

TEST_CASE("without the check, a NaN stays in its tensor where the ratio adapts, in its element where not",
          "[fused_lamb]") {
  const auto parameters = random_parameters({{50}, {60}, {70}}, at::kFloat);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{parameters[0], parameters[1]});
  groups.emplace_back(std::vector<Tensor>{parameters[2]},
                      std::make_unique<FusedLambOptions>(FusedLambOptions().adapt(false)));
  FusedLamb optimizer(groups);
  set_random_gradients(parameters);
  parameters[1].mutable_grad()[7] = kNaN;
  parameters[2].mutable_grad()[7] = kNaN;
  optimizer.step();
  CHECK(count_true(parameters[0].isnan()) == 0);
  CHECK(count_true(parameters[1].isnan()) == 60);
  CHECK(std::isnan(optimizer.trust_ratio(parameters[1])));
  CHECK(count_true(parameters[2].isnan()) == 1);
}

TEST_CASE("parameters that join, leave or sit out keep the others' steps", "[fused_lamb]") {
  torch::manual_seed(15);
  auto parameters = random_parameters({{3}, {400}, {5}}, at::kDouble);
  std::vector<ReferenceLamb> references;
  for (const Tensor& p : parameters) references.emplace_back(rule_of(FusedLambOptions(0.1)), to_doubles(p));
  FusedLamb optimizer({parameters[0], parameters[1]}, FusedLambOptions(0.1));
  CHECK(optimizer.trust_ratio(parameters[0]) == 1);
  const auto step = [&](const std::vector<size_t>& taking_part) {
    set_random_gradients(parameters);
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (std::count(taking_part.begin(), taking_part.end(), i) == 0) {
        parameters[i].mutable_grad() = Tensor();
      } else {
        references[i].step(to_doubles(parameters[i].grad()));
      }
    }
    optimizer.step();
    for (size_t i = 0; i < parameters.size(); ++i) {
      CHECK(distance(parameters[i], torch::tensor(references[i].parameter, at::kDouble)) <= 1e-13);
    }
  };
  step({0, 1});
  step({1});
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({parameters[2]}));
  step({0, 1, 2});
  step({0, 2});
  parameters[0].set_data(parameters[0].detach().clone());  // new memory
  step({0, 1, 2});
  CHECK(state_of(optimizer, parameters[0]).step() == 4);
  CHECK(state_of(optimizer, parameters[2]).step() == 3);
}

}  // namespace pacer::testing::lamb
