// GradientClipping by the norm of the step before in a Session: what is clipped exactly all the same, and
// what checkpoints hold of it. Buckets are compared with a textbook in onebit_previous_norm.cpp.
#include <cmath>
#include <limits>
#include <utility>

#include <torch/optim/adamw.h>

#include <pacer/hooks/gradient_clipping.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/session/small_model.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing::session_clipping_previous {
namespace {

constexpr const char* kKey = "hook/gradient_clipping/previous_norm";

RegisteredHook clipping(double max_norm, bool by_previous) {
  return {"clipping", "clipping", true, [=](Session& session, SmallModel&, EpochSampler&) {
            session.use(GradientClipping(GradientClippingOptions(max_norm).by_previous_norm(by_previous)));
          }};
}

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

TEMPLATE_TEST_CASE("optimizers that do not compress are clipped exactly whatever the norm before",
                   "[session][clipping]", FusedAdamW, FusedAdam, torch::optim::AdamW) {
  auto model = small_model(), twin = small_model();
  TestType optimizer(model->parameters(), OptionsOf<TestType>(0.01)),
      peer(twin->parameters(), OptionsOf<TestType>(0.01));
  Session session(*model, optimizer), exact(*twin, peer);
  session.use(GradientClipping(GradientClippingOptions(0.05).by_previous_norm(true)));
  exact.use(GradientClipping(0.05));
  const double weights[] = {1, 0.01, 8, std::nan(""), 0.1, 1e-3, 1};
  for (int64_t i = 0; i < 7; ++i) {
    CAPTURE(i);
    for (const auto& [a_session, a_model] :
         {std::make_pair(&session, &model), std::make_pair(&exact, &twin)}) {
      const auto batch = small_batch(i);
      auto [x, y] = a_session->begin(batch.first, batch.second);
      a_session->backward((*a_model)->loss(x, y) * weights[i]);
      a_session->step();
    }
    REQUIRE(distance(model->parameters(), twin->parameters()) == 0);
    CHECK((session.gradient_norm() == exact.gradient_norm()) == !std::isnan(weights[i]));
  }
  CHECK(session.skipped_steps() == 1);
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

TEST_CASE("a checkpoint of exact clipping has no norm before, and loads as a first step does",
          "[session][clipping][resume]") {
  const TemporaryFolder folder;
  auto state = saved(in_buckets(false), {clipping(0.05, false)}, 4, folder.path());
  CHECK(state.session.count(kKey) == 0);
  SmallRun resumed(in_buckets(true), {clipping(0.05, true)});
  resumed.session->use(checkpoints_in(folder.path()));
  REQUIRE(resumed.resume() == 4);
  CHECK(resumed.state().session.at(kKey).item<double>() == 0);
  state.session[kKey] = torch::zeros({}, at::kDouble);
  SmallRun loaded(in_buckets(true), {clipping(0.05, true)});
  loaded.load(state);
  for (int step = 0; step < 3; ++step) {
    resumed.step();
    loaded.step();
    CHECK(first_difference(resumed.state(), loaded.state()) == "");
    CHECK(resumed.state().session.at(kKey).item<double>() == resumed.session->gradient_norm());
  }
}

TEST_CASE("exact clipping goes on from a checkpoint that has a norm before", "[session][clipping][resume]") {
  const TemporaryFolder folder;
  auto state = saved(in_buckets(false), {clipping(0.05, true)}, 4, folder.path());
  CHECK(state.session.at(kKey).item<double>() > 0.05);
  state.session.erase(kKey);
  SmallRun loaded(in_buckets(false), {clipping(0.05, false)}),
      resumed(in_buckets(false), {clipping(0.05, false)});
  loaded.load(state);
  resumed.session->use(checkpoints_in(folder.path()));
  REQUIRE(resumed.resume() == 4);
  loaded.step();
  resumed.step();
  CHECK(first_difference(loaded.state(), resumed.state()) == "");
}

TEST_CASE("a norm before that was altered shows in the run, and one that cannot be is refused",
          "[session][clipping][resume]") {
  SmallRun run(in_buckets(true), {clipping(0.05, true)});
  for (int step = 0; step < 4; ++step) run.step();
  const detail::TrainingState before = run.state();
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    detail::TrainingState damaged = before;
    damaged.session[kKey] = torch::full({}, wrong, at::kDouble);
    CHECK(contains(refusal([&] { run.load(damaged); }), "\"previous_norm\" of the state to load is"));
    CHECK(first_difference(run.state(), before) == "");
  }
  run.step();
  const detail::TrainingState expected = run.state();
  run.load(before);
  run.step();
  CHECK(first_difference(run.state(), expected) == "");
  detail::TrainingState altered = before;
  altered.session[kKey] = altered.session.at(kKey) * 2;
  run.load(altered);
  run.step();
  CHECK(first_difference(run.state().rank_optimizer, expected.rank_optimizer) != "");
}

}  // namespace pacer::testing::session_clipping_previous
