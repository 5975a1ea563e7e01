// State of FusedAdam and FusedAdamW: saved, loaded, refused, moved.
#include "support/catch.h"

#include <torch/optim/sgd.h>

#include "support/checkpoints/archives.h"
#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

// Every option away from its default, so that losing one shows.
FusedAdamWOptions rich_options(const Mode& mode, bool amsgrad) {
  return with_mode(FusedAdamWOptions(0.02)
                       .betas({0.8, 0.95})
                       .eps(1e-4)
                       .weight_decay(0.05)
                       .amsgrad(amsgrad)
                       .bias_correction(false)
                       .finite_check(true)
                       .seed(0xfedcba9876543210ull),
                   mode);
}

std::vector<torch::optim::OptimizerParamGroup> two_groups(const std::vector<Tensor>& p,
                                                          const FusedAdamWOptions& options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{p[0], p[1]}, std::make_unique<FusedAdamWOptions>(options));
  auto second = options;
  groups.emplace_back(std::vector<Tensor>{p[2], p[3]},
                      std::make_unique<FusedAdamWOptions>(second.lr(0.01).weight_decay(0)));
  return groups;
}

// Parameters with unequal step counts, one of them without state.
struct Run {
  std::vector<Tensor> parameters;
  FusedAdamW optimizer;

  explicit Run(const std::vector<Tensor>& values, const FusedAdamWOptions& options)
      : parameters(clones(values)), optimizer(two_groups(parameters, options)) {}
  void step(int steps, uint64_t seed) {
    torch::manual_seed(seed);
    for (int i = 0; i < steps; ++i) {
      set_random_gradients(parameters);
      if (seed == 1) {  // shrinking, so that the running maximum is not the last value
        for (const Tensor& p : parameters) p.grad().mul_(8 - i);
      }
      if (i % 2 == 1) parameters[1].mutable_grad() = Tensor();
      if (seed == 1) parameters[3].mutable_grad() = Tensor();
      optimizer.step();
    }
  }
};

std::vector<Tensor> some_values(at::ScalarType dtype) {
  auto parameters = random_parameters({{4, 3}, {129}, {}}, dtype);
  parameters.push_back(torch::randn({5, 6}).to(dtype).t().requires_grad_());
  return parameters;
}

TEST_CASE("a run that was saved and loaded continues to the bit, in every mode", "[fused_adam]") {
  for (const Mode& mode : all_modes()) {
    for (const bool amsgrad : {false, true}) {
      CAPTURE(mode.name, amsgrad);
      torch::manual_seed(61);
      Run run(some_values(mode.dtype), rich_options(mode, amsgrad));
      run.step(5, 1);
      Run resumed(run.parameters, FusedAdamWOptions(0.9)), cold(run.parameters, rich_options(mode, amsgrad));
      load_from(resumed.optimizer, saved(run.optimizer));
      CHECK(difference(snapshot(run.optimizer), snapshot(resumed.optimizer)) !=
            "");  // gradients differ so far
      for (Run* each : {&run, &resumed, &cold}) {
        for (const Tensor& p : each->parameters) p.mutable_grad() = Tensor();
      }
      CHECK(difference(snapshot(run.optimizer), snapshot(resumed.optimizer)) == "");
      CHECK(state_of(resumed.optimizer, resumed.parameters[1]).step() == 3);
      for (Run* each : {&run, &resumed, &cold}) each->step(4, 2);
      CHECK(difference(snapshot(run.optimizer), snapshot(resumed.optimizer)) == "");
      CHECK_FALSE(same_bits(run.parameters, cold.parameters));
      // Nothing of a former run survives a load, not even the state of a parameter that has none in the
      // archive.
      Run former(cold.parameters, rich_options(mode, amsgrad)),
          early(cold.parameters, rich_options(mode, amsgrad));
      for (Run* each : {&former, &early}) each->step(1, 1);
      const std::string archive = saved(early.optimizer);
      former.step(2, 2);
      load_from(former.optimizer, archive);
      CHECK(former.optimizer.state().size() == 3);
      // Loading shares no memory with a later save, nor with the saved run.
      run.step(1, 3);
      CHECK(difference(snapshot(run.optimizer), snapshot(resumed.optimizer)) != "");
      resumed.step(1, 3);
      CHECK(difference(snapshot(run.optimizer), snapshot(resumed.optimizer)) == "");
    }
  }
}

TEST_CASE("saving changes nothing, and the same state is saved as the same bytes", "[fused_adam]") {
  torch::manual_seed(62);
  Run run(some_values(at::kBFloat16), rich_options(all_modes()[2], true));
  run.step(3, 1);
  const auto before = snapshot(run.optimizer);
  const std::string first = saved(run.optimizer);
  CHECK(difference(before, snapshot(run.optimizer)) == "");
  CHECK(first == saved(run.optimizer));
}

// R3: what can be lost without a trace need not be saved.
TEST_CASE("every entry of an archive matters: dropped or altered, it is refused or changes the run",
          "[fused_adam]") {
  for (const Mode& mode : {all_modes()[1], all_modes()[2], all_modes()[3], all_modes()[5]}) {
    torch::manual_seed(63);
    Run run(some_values(mode.dtype), rich_options(mode, true));
    run.step(3, 1);
    const std::string archive = saved(run.optimizer);
    Run expected(run.parameters, FusedAdamWOptions(0.9));
    load_from(expected.optimizer, archive);
    expected.step(2, 2);
    // A step that only the finite check can stop.
    const auto bad_step = [](Run& r) {
      set_random_gradients(r.parameters);
      r.parameters[0].grad().fill_(HUGE_VAL);
      r.optimizer.step();
    };
    bad_step(expected);
    const auto last = snapshot(expected.optimizer);

    size_t refused = 0, changed = 0;
    for (const auto& [path, is_folder] : entries_of(archive)) {
      // Written because LibTorch's loader asks for it; all versions we read have the same layout.
      // Without its version a file counts as one of an older version, whose fields are the same here.
      if (path == "pytorch_version" || contains(path, "state_version")) continue;
      for (const bool drop : {true, false}) {
        if (is_folder && !drop) continue;
        // The label that joins a parameter to its state says nothing where there is no state.
        if (!drop && path == "param_groups > param_groups/1 > params/1") continue;
        if (!drop && contains(path, " names/")) continue;  // here parameters have none, so positions decide
        CAPTURE(mode.name, path, drop);
        Run victim(run.parameters, FusedAdamWOptions(0.9));
        const auto before = snapshot(victim.optimizer);
        const std::string bad = drop ? without(archive, path) : with_altered(archive, path);
        try {
          load_from(victim.optimizer, bad);
        } catch (const InvalidArgument&) {
          ++refused;
          CHECK(difference(before, snapshot(victim.optimizer)) == "");
          continue;
        } catch (const std::exception& error) {
          UNSCOPED_INFO(error.what());
          CHECK(std::string("refused by another type of exception") == path);
          continue;
        }
        try {
          victim.step(2, 2);
          bad_step(victim);
        } catch (const InvalidArgument&) {
          ++refused;
          continue;
        }
        ++changed;
        CHECK(difference(last, snapshot(victim.optimizer)) != "");
      }
    }
    CHECK(refused >= 20);
    CHECK(changed >= 20);
  }
}

TEST_CASE("an archive that does not fit is refused and changes nothing", "[fused_adam]") {
  torch::manual_seed(64);
  const auto mode = all_modes()[1];
  Run run(some_values(at::kFloat), rich_options(mode, true));
  run.step(3, 1);
  const std::string archive = saved(run.optimizer);
  const auto options = FusedAdamWOptions(0.5).amsgrad(true);
  const auto refused = [&](const std::vector<std::vector<std::vector<int64_t>>>& shapes,
                           const std::vector<std::string>& parts) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    std::vector<Tensor> all;
    for (const auto& group : shapes) {
      groups.emplace_back(random_parameters(group, at::kFloat));
      for (const Tensor& p : groups.back().params()) all.push_back(p);
    }
    FusedAdamW optimizer(groups, options);
    set_random_gradients(all);
    optimizer.step();
    return unless_refused(optimizer, parts, [&] { load_from(optimizer, archive); });
  };
  CHECK(refused({{{4, 3}, {129}, {}, {6, 5}}}, {"2", "1"}) == "");      // one group instead of two
  CHECK(refused({{{4, 3}, {129}}, {{}}, {{6, 5}}}, {"2", "3"}) == "");  // three groups
  CHECK(refused({{{4, 3}}, {{129}, {}, {6, 5}}}, {"2", "1"}) == "");    // other sizes
  CHECK(refused({{{4, 3}, {129}, {2}}, {{}, {6, 5}}}, {"2", "3"}) == "");
  CHECK(refused({{{4, 3}, {129}}, {{}}}, {"2", "1"}) == "");
  CHECK(refused({{{3, 4}, {129}}, {{}, {6, 5}}}, {"parameter 0 of group 0", "exp_avg"}) == "");  // transposed
  CHECK(refused({{{12}, {129}}, {{}, {6, 5}}}, {"parameter 0 of group 0", "exp_avg"}) == "");    // flattened
  CHECK(refused({{{4, 3}, {128}}, {{}, {6, 5}}}, {"parameter 1 of group 0", "exp_avg"}) == "");  // shorter
  CHECK(refused({{{4, 3}, {129}}, {{1}, {6, 5}}}, {"parameter 0 of group 1", "exp_avg"}) ==
        "");  // one element, one dimension
  CHECK(refused({{{129}, {4, 3}}, {{}, {6, 5}}}, {"parameter 0 of group 0", "exp_avg"}) ==
        "");  // another order
  CHECK(refused({{{4, 3}, {129}}, {{}, {6, 5}}}, {}) == "<no exception>");
}

TEST_CASE("what is not an archive of Adam is refused and changes nothing", "[fused_adam]") {
  torch::manual_seed(65);
  Run run(some_values(at::kFloat), rich_options(all_modes()[1], true));
  run.step(3, 1);
  const auto refused = [&](const std::string& bytes) {
    const auto before = snapshot(run.optimizer);
    bool threw = false;
    try {
      load_from(run.optimizer, bytes);
    } catch (const std::exception&) {
      threw = true;
    }
    return threw && difference(before, snapshot(run.optimizer)).empty();
  };
  CHECK(refused(""));
  CHECK(refused("not an archive"));
  const std::string archive = saved(run.optimizer);
  CHECK(refused(archive.substr(0, archive.size() / 2)));
  std::stringstream tensor;
  torch::save(torch::ones({3}), tensor);
  CHECK(refused(tensor.str()));
  torch::optim::SGD sgd(run.parameters, 0.1);
  CHECK(refused(saved(sgd)));

  const std::pair<const char*, c10::IValue> wrong_values[] = {
      {" > lr", -1.0},
      {" > lr", int64_t{1}},
      {" > eps", std::string("small")},
      {" > betas", 0.9},
      {" > rounding", int64_t{2}},
      {" > master_weights", int64_t{-1}},
      {" > step", int64_t{-1}},
      {" > step", 1.5},
      {" > exp_avg_sq", int64_t{3}},
      {" > params/0", std::string("weight")},
      {" > params/0", std::string("99999999999999999999999999")},
      {" > params/size", torch::tensor(int64_t{-1})},
      {"param_groups/size", torch::tensor(int64_t{1})},
      {"state", std::string("none")},
  };
  for (const auto& [part, wrong] : wrong_values) {
    CAPTURE(part, wrong);
    const std::string bad = rewritten(
        archive, [&, part = part, wrong = wrong](const std::string& path, const c10::IValue& value) {
          const size_t at = path.rfind(part);
          return at != std::string::npos && at + std::string(part).size() == path.size() ? wrong : value;
        });
    CHECK(unless_refused(run.optimizer, {}, [&] { load_from(run.optimizer, bad); }) == "");
  }

  for (const std::string moment : {" > exp_avg", " > exp_avg_sq"}) {
    CAPTURE(moment);
    const std::string bad = rewritten(archive, [&](const std::string& path, const c10::IValue& value) {
      return path.size() > moment.size() && path.substr(path.size() - moment.size()) == moment ? c10::IValue()
                                                                                               : value;
    });
    CHECK(unless_refused(run.optimizer, {"parameter 0 of group 0", "exp_avg"},
                         [&] { load_from(run.optimizer, bad); }) == "");
  }
  const std::pair<const char*, Tensor (*)(const Tensor&)> wrong_tensors[] = {
      {"integer", [](const Tensor& t) { return t.to(at::kLong); }},
      {"complex", [](const Tensor& t) { return t.to(at::kComplexFloat); }},
      {"sparse", [](const Tensor& t) { return t.to_sparse(); }},
  };
  for (const auto& [name, make] : wrong_tensors) {
    CAPTURE(name);
    const std::string bad =
        rewritten(archive, [&, make = make](const std::string& path, const c10::IValue& value) {
          return contains(path, " > exp_avg") ? c10::IValue(make(value.toTensor())) : value;
        });
    CHECK(unless_refused(run.optimizer, {"parameter 0 of group 0", "exp_avg"},
                         [&] { load_from(run.optimizer, bad); }) == "");
  }
}

TEST_CASE(
    "the archive of many small tensors is no larger than torch's, and the same holds for the state in memory",
    "[fused_adam]") {
  torch::manual_seed(66);
  Twins<FusedAdamW> twins(random_parameters(std::vector<std::vector<int64_t>>(50, {7}), at::kFloat), 0.01);
  twins.step_with_random_gradients();
  const size_t ours = saved(twins.optimizer).size(), theirs = saved(twins.peer).size();
  INFO(ours << " bytes against torch's " << theirs);
  CHECK(ours <= theirs + theirs / 4);
}

TEST_CASE("a moved optimizer continues to the bit", "[fused_adam]") {
  torch::manual_seed(69);
  Run run(some_values(at::kBFloat16), rich_options(all_modes()[2], false));
  Run still(run.parameters, rich_options(all_modes()[2], false));
  for (Run* each : {&run, &still}) each->step(3, 1);
  std::vector<FusedAdamW> shelf;
  shelf.push_back(std::move(run.optimizer));
  shelf.emplace_back(clones(run.parameters));  // moves the first one again
  run.optimizer = std::move(shelf[0]);
  for (Run* each : {&run, &still}) each->step(3, 2);
  CHECK(difference(snapshot(run.optimizer), snapshot(still.optimizer)) == "");
}

}  // namespace
}  // namespace pacer::testing
