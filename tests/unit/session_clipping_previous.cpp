// GradientClipping by the norm of the step before: the step against a restatement by hand, and what
// checkpoints hold of it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <pacer/schedulers/gradient_accumulation.h>
#include <pacer/schedulers/gradient_clipping.h>
#include <pacer/schedulers/session.h>

#include "support/catch.h"
#include "support/small_model.h"
#include "support/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing::session_clipping_previous {
namespace {

constexpr const char* kKey = "hook/gradient_clipping/previous_norm";

template <class Optimizer>
auto strong_options() {
  if constexpr (std::is_same_v<Optimizer, torch::optim::SGD>) {
    return torch::optim::SGDOptions(0.5).momentum(0.9);
  } else {
    return OptionsOf<Optimizer>(0.01);
  }
}

double norm_in_double(const std::vector<Tensor>& parameters) {
  double sum = 0;
  for (const Tensor& parameter : parameters) {
    sum += parameter.grad().to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(sum);
}

RegisteredHook clipping(double max_norm, bool by_previous) {
  return {"clipping", "clipping", true, [=](Session& session, SmallModel&, EpochSampler&) {
            session.use(GradientClipping(max_norm).by_previous_norm(by_previous));
          }};
}

RegisteredOptimizer own_adamw() { return {"FusedAdamW", true, making<FusedAdamW>(FusedAdamWOptions(0.01))}; }

RegisteredOptimizer in_buckets(bool overlap) {
  const auto options =
      OneBitAdamOptions(0.01).compress_alone(true).bucket_bytes(1000).overlap_backward(overlap);
  return {"in buckets", true, making_onebit<OneBitAdam>(options), at::kFloat, true};
}

Checkpoints checkpoints_in(const std::string& folder) {
  return Checkpoints(CheckpointsOptions(folder).every(1000).keep(1));
}

// So many steps, and the checkpoint after them.
detail::TrainingState saved(const RegisteredOptimizer& optimizer, const std::vector<RegisteredHook>& hooks,
                            int steps, const std::string& folder) {
  SmallRun run(optimizer, hooks);
  run.session->use(checkpoints_in(folder));
  for (int step = 0; step < steps; ++step) run.step();
  run.finish();
  return run.state();
}

}  // namespace

TEMPLATE_TEST_CASE("by the norm before, gradients are clipped by the larger of two norms",
                   "[session][clipping]", FusedAdamW, FusedAdam, torch::optim::AdamW, torch::optim::SGD) {
  constexpr double kMaxNorm = 0.05;
  auto model = small_model(), twin = small_model(), other = small_model();
  TestType optimizer(model->parameters(), strong_options<TestType>()),
      peer(twin->parameters(), strong_options<TestType>()),
      exact(other->parameters(), strong_options<TestType>());
  Session session(*model, optimizer), exact_session(*other, exact);
  session.use(GradientClipping(kMaxNorm).by_previous_norm());
  exact_session.use(GradientClipping(kMaxNorm));
  const auto train = [](Session& a_session, SmallModel& a_model, int64_t i, double weight) {
    const auto batch = small_batch(i);
    auto [x, y] = a_session.begin(batch.first, batch.second);
    a_session.backward(a_model->loss(x, y) * weight);
    a_session.step();
  };
  const double weights[] = {1, 0.01, 8, std::nan(""), 0.1, 1e-3, 1e-3, 1};
  double previous = 0;
  int64_t longer_before = 0;
  for (int64_t i = 0; i < 8; ++i) {
    CAPTURE(i);
    train(session, model, i, weights[i]);
    train(exact_session, other, i, weights[i]);
    const auto batch = small_batch(i);
    (twin->loss(batch.first, batch.second) * weights[i]).backward();
    const double norm = norm_in_double(twin->parameters());
    if (std::isfinite(norm)) {
      CHECK(session.gradient_norm() == Catch::Approx(norm).epsilon(1e-5));  // of this step
      longer_before += previous > norm;
      const double larger = std::max(norm, previous);
      for (const Tensor& parameter : twin->parameters()) {
        parameter.mutable_grad().mul_(std::min(1.0, kMaxNorm / larger));
      }
      peer.step();
      previous = norm;
    }
    peer.zero_grad();
    REQUIRE(distance(model->parameters(), twin->parameters()) < 2e-6);
    if (i == 0) CHECK(distance(model->parameters(), other->parameters()) == 0);
  }
  CHECK(session.skipped_steps() == 1);
  CHECK(longer_before >= 3);
  CHECK(distance(model->parameters(), other->parameters()) > 1e-4);
}

TEST_CASE("buckets that are clipped by the norm before while backward runs resume to the bit",
          "[session][clipping][overlap][resume]") {
  constexpr int kSteps = 8;
  for (const RegisteredHook& beside : all_hooks()) {
    if (beside.name != "accumulation" && beside.name != "layer drop") continue;
    const std::vector<RegisteredHook> hooks = {beside, clipping(0.05, true)};
    SmallRun whole(in_buckets(false), hooks);
    std::vector<detail::TrainingState> states = {whole.state()};
    for (int step = 0; step < kSteps; ++step) {
      whole.step();
      states.push_back(whole.state());
    }
    for (int stop = 1; stop < kSteps; ++stop) {
      CAPTURE(beside.name, stop);
      const TemporaryFolder folder;
      saved(in_buckets(true), hooks, stop, folder.path());
      SmallRun resumed(in_buckets(true), hooks);
      resumed.session->use(checkpoints_in(folder.path()));
      REQUIRE(resumed.resume() == stop);
      REQUIRE(first_difference(resumed.state(), states[static_cast<size_t>(stop)]) == "");
      for (int step = stop; step < kSteps; ++step) {
        resumed.step();
        REQUIRE(first_difference(resumed.state(), states[static_cast<size_t>(step) + 1]) == "");
      }
    }
  }
}

TEST_CASE("a checkpoint of exact clipping has no norm before, and the first step is exact then",
          "[session][clipping][resume]") {
  const TemporaryFolder folder;
  const auto state = saved(own_adamw(), {clipping(0.05, false)}, 3, folder.path());
  CHECK(state.session.count(kKey) == 0);
  SmallRun exact(own_adamw(), {clipping(0.05, false)}), resumed(own_adamw(), {clipping(0.05, true)});
  exact.load(state);
  resumed.step();  // leaves a norm
  CHECK(resumed.state().session.at(kKey).item<double>() > 0);
  SmallRun fresh(own_adamw(), {clipping(0.05, true)});
  fresh.session->use(checkpoints_in(folder.path()));
  REQUIRE(fresh.resume() == 3);
  CHECK(fresh.state().session.at(kKey).item<double>() == 0);
  exact.step();
  fresh.step();
  CHECK(first_difference(exact.state().model, fresh.state().model) == "");
  CHECK(first_difference(exact.state().optimizer, fresh.state().optimizer) == "");
}

TEST_CASE("exact clipping goes on from a checkpoint that has a norm before", "[session][clipping][resume]") {
  const TemporaryFolder folder;
  auto state = saved(own_adamw(), {clipping(0.05, true)}, 3, folder.path());
  CHECK(state.session.at(kKey).item<double>() > 0.05);
  state.session.erase(kKey);
  SmallRun loaded(own_adamw(), {clipping(0.05, false)}), resumed(own_adamw(), {clipping(0.05, false)});
  loaded.load(state);
  resumed.session->use(checkpoints_in(folder.path()));
  REQUIRE(resumed.resume() == 3);
  loaded.step();
  resumed.step();
  CHECK(first_difference(loaded.state(), resumed.state()) == "");
}

TEST_CASE("a norm before that cannot be is refused and nothing is loaded", "[session][clipping][resume]") {
  SmallRun run(own_adamw(), {clipping(0.05, true)});
  for (int step = 0; step < 2; ++step) run.step();
  const detail::TrainingState before = run.state();
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    detail::TrainingState damaged = before;
    damaged.session[kKey] = torch::full({}, wrong, at::kDouble);
    CHECK(contains(refusal([&] { run.load(damaged); }), "\"previous_norm\" of the state to load is"));
    CHECK(first_difference(run.state(), before) == "");
  }
}

}  // namespace pacer::testing::session_clipping_previous
