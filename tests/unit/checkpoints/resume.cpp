// Resume (R1, R3): an interrupted run goes on to the bit, a cold start does not, and the loss or change of
// any saved field shows.
#include <algorithm>

#include "support/catch.h"
#include "support/samples.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

// All hooks that can be used together, one of each kind.
std::vector<RegisteredHook> one_of_each_kind(const RegisteredOptimizer& optimizer) {
  const std::string precision = optimizer.dtype == at::kFloat ? "fp16" : "bf16";
  const bool compresses = optimizer.has_ranks && !contains(optimizer.name, "uncompressed");
  const std::string clipping = compresses ? "clipping by the norm before" : "clipping";
  std::vector<RegisteredHook> chosen;
  for (const RegisteredHook& hook : all_hooks()) {
    bool taken = (hook.kind == "precision" && hook.name != precision) ||
                 (hook.kind == "clipping" && hook.name != clipping);
    for (const RegisteredHook& other : chosen) taken = taken || other.kind == hook.kind;
    if (!taken) chosen.push_back(hook);
  }
  return chosen;
}

Checkpoints checkpoints_in(const std::string& folder) {
  return Checkpoints(CheckpointsOptions(folder).every(1000).keep(1));
}

// Another value of the same dtype and shape, in an element in the middle.
Tensor altered(const Tensor& tensor) {
  Tensor other = tensor.detach().clone();
  Tensor last = other.view({-1}).narrow(0, other.numel() / 2, 1);
  // One scale is rounded to the next, and codes of a group whose scale is zero say nothing: of moments in 8 bits all
  // are altered.
  const bool in_8_bits = tensor.scalar_type() == at::kChar || tensor.scalar_type() == at::kByte;
  if (in_8_bits || tensor.scalar_type() == at::kHalf) last = other.view({-1});
  if (tensor.scalar_type() == at::kBool) {
    last.logical_not_();
  } else if (at::isFloatingType(tensor.scalar_type())) {
    last.copy_(last * 1.5 + 0.01);
  } else {
    // A remainder's last digit may be lost in the next rounding.
    last.bitwise_xor_(tensor.scalar_type() == at::kShort ? 0x2000 : 1);
  }
  return other;
}

// Steps after which a run is compared.
constexpr int kStepsAfter = 3;

struct Part {
  const char* name;
  NamedTensors detail::TrainingState::*tensors;
};
const Part kModel = {"model", &detail::TrainingState::model};
const Part kSession = {"session", &detail::TrainingState::session};
const Part kOptimizer = {"optimizer", &detail::TrainingState::optimizer};
const Part kRankOptimizer = {"rank_optimizer", &detail::TrainingState::rank_optimizer};

// The parts of a state whose fields are tried with this optimizer. Fields of the model and of the Session are
// the same whatever the optimizer, so that one optimizer of a dtype tries them, unless the run is a long one.
std::vector<Part> parts_to_try(const RegisteredOptimizer& optimizer) {
  static const std::vector<RegisteredOptimizer> optimizers = all_optimizers();
  const auto first = std::find_if(optimizers.begin(), optimizers.end(),
                                  [&](const auto& other) { return other.dtype == optimizer.dtype; });
  if (wants_long_tests() || first->name == optimizer.name) {
    return {kModel, kOptimizer, kRankOptimizer, kSession};
  }
  return {kOptimizer, kRankOptimizer};
}

}  // namespace

TEST_CASE("R1: stopped anywhere, a run goes on from its checkpoint to the bit", "[session][resume]") {
  constexpr int kSteps = 8;
  const int apart = wants_long_tests() ? 1 : kSteps - 1;
  int first = 0;  // the next optimizer stops a step later, so that together they stop everywhere
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    const auto hooks = one_of_each_kind(optimizer);
    INFO(optimizer.name);
    SmallRun whole(optimizer, hooks);
    std::vector<detail::TrainingState> states = {whole.state()};
    for (int step = 0; step < kSteps; ++step) {
      whole.step();
      states.push_back(whole.state());
    }
    for (int stop = 1 + first++ % apart; stop < kSteps; stop += apart) {
      INFO("stopped after step " << stop);
      const TemporaryFolder folder;
      {
        SmallRun run(optimizer, hooks);
        run.session->use(checkpoints_in(folder.path()));
        for (int step = 0; step < stop; ++step) run.step();
        run.finish();
      }
      SmallRun resumed(optimizer, hooks);
      for (const Tensor& parameter : resumed.model->parameters()) parameter.detach().add_(1);
      resumed.session->use(checkpoints_in(folder.path()));
      REQUIRE(resumed.resume() == stop);
      REQUIRE(first_difference(resumed.state(), states[stop]) == "");
      for (int step = stop; step < kSteps; ++step) {
        resumed.step();
        REQUIRE(first_difference(resumed.state(), states[step + 1]) == "");
      }
    }
    // A cold start is behind by the steps before it.
    REQUIRE(first_difference(states[kSteps - 1].model, states[kSteps].model) != "");
  }
}

// The second and the third layer have what the first one has.
bool is_left_out(const std::string& name) {
  return !wants_long_tests() && (contains(name, "stack.1.") || contains(name, "stack.2."));
}

// Files of older versions lack them.
bool may_be_missing(const std::string& name) {
  return contains(name, "state_version") || name == "progress/micro_batches" || contains(name, "next_factor");
}

TEST_CASE("R3: a field that is missing or of another dtype or shape is refused by name and nothing is loaded",
          "[session][resume]") {
  Turns turns(8);
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    const auto hooks = one_of_each_kind(optimizer);
    SmallRun source(optimizer, hooks), target(optimizer, hooks);
    for (int step = 0; step < 3; ++step) source.step();
    target.step();
    const detail::TrainingState saved = source.state(), before = target.state();
    for (const Part& part : parts_to_try(optimizer)) {
      for (const auto& item : saved.*part.tensors) {
        if (is_left_out(item.first) || !turns.is_next()) continue;
        INFO(optimizer.name << ", " << part.name << ", " << item.first);
        detail::TrainingState damaged = saved;
        if (!may_be_missing(item.first)) {
          (damaged.*part.tensors).erase(item.first);
          REQUIRE(contains(refusal([&] { target.load(damaged); }), item.first));
        }
        damaged = saved;
        (damaged.*part.tensors)[item.first + "x"] = item.second;
        REQUIRE(contains(refusal([&] { target.load(damaged); }), item.first + "x"));
        for (const Tensor& bad : {at::stack({item.second, item.second}), item.second.to(at::kComplexFloat)}) {
          damaged = saved;
          (damaged.*part.tensors)[item.first] = bad;
          REQUIRE(refusal([&] { target.load(damaged); }) != "<no exception>");
        }
      }
      // Once for all of them: what any of them loaded would still be there.
      INFO(optimizer.name << ", a field of " << part.name);
      REQUIRE(first_difference(target.state(), before) == "");
    }
  }
}

TEST_CASE("R3: a field that was altered is refused or shows in the run", "[session][resume]") {
  Turns turns(12);
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    for (const bool with_hooks : {false, true}) {
      const auto hooks = with_hooks ? one_of_each_kind(optimizer) : std::vector<RegisteredHook>();
      SmallRun source(optimizer, hooks);
      for (int step = 0; step < 3; ++step) source.step();
      const detail::TrainingState saved = source.state();
      // With LearningRate the rate is a function of progress, and with Vary weight decay is; without, both must
      // be loaded.
      std::vector<std::pair<const Part*, std::string>> tried;
      const std::vector<Part> parts = parts_to_try(optimizer);
      for (const Part& part : parts) {
        for (const auto& item : saved.*part.tensors) {
          if (is_left_out(item.first) || !turns.is_next()) continue;
          // The first says which fields there are, and these are all there; the second is told of.
          if (may_be_missing(item.first)) continue;
          const bool is_set = item.first.compare(0, 6, "group/") == 0 &&
                              (contains(item.first, "/lr") || contains(item.first, "/weight_decay"));
          if (with_hooks ? is_set : !is_set && !wants_long_tests()) continue;
          tried.emplace_back(&part, item.first);
        }
      }
      if (tried.empty()) continue;
      std::vector<detail::TrainingState> expected;
      for (int step = 0; step < kStepsAfter; ++step) {
        source.step();
        expected.push_back(source.state());
      }
      // Whether a run that goes on from where `target` is differs after one of its steps from the one above.
      SmallRun target(optimizer, hooks);
      const auto differs = [&] {
        return std::any_of(expected.begin(), expected.end(), [&](const detail::TrainingState& state) {
          target.step();
          return first_difference(target.state(), state) != "";
        });
      };
      for (const auto& [part, field] : tried) {
        INFO(optimizer.name << ", " << part->name << ", " << field);
        detail::TrainingState damaged = saved;
        (damaged.*part->tensors)[field] = altered((saved.*part->tensors).at(field));
        const detail::TrainingState before = target.state();
        try {
          target.load(damaged);
        } catch (const InvalidArgument& error) {
          CHECK(std::string(error.what()).size() > 20);
          REQUIRE(first_difference(target.state(), before) == "");
          continue;
        }
        REQUIRE(differs());
      }
      target.load(saved);
      REQUIRE_FALSE(differs());
    }
  }
}

}  // namespace pacer::testing
