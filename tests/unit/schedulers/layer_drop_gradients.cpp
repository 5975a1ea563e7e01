// What a Session does for layers that were dropped: gradients of exactly zero for a layer that sat out the
// whole window, what counts as dropped, what is refused, and resume.
#include <algorithm>
#include <cmath>

#include <torch/optim/adamw.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/recompute.h>
#include <pacer/parallel/data_parallel.h>
#include <pacer/session/session.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/schedulers/gate_progress.h"
#include "support/schedulers/gated_stack.h"
#include "support/session/small_model.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

constexpr int64_t kGatedLayers = 3;

// Copies the gradients as the optimizer is about to see them.
class GradientProbe : public Hook {
 public:
  GradientProbe(std::vector<Tensor> parameters, std::vector<Tensor>& seen)
      : parameters_(std::move(parameters)), seen_(&seen) {}
  std::string hook_name() const override { return "gradient_probe"; }
  Slot slot() const override { return Slot::record; }
  void gradients_ready(const Progress&) override {
    seen_->clear();
    for (const Tensor& p : parameters_) seen_->push_back(p.grad().defined() ? p.grad().clone() : Tensor());
  }

 private:
  std::vector<Tensor> parameters_;
  std::vector<Tensor>* seen_;
};

// Stands for resume(): the run has these steps behind it.
class StartAt : public Hook {
 public:
  explicit StartAt(int64_t step) : step_(step) {}
  std::string hook_name() const override { return "start_at"; }
  Slot slot() const override { return Slot::record; }
  void attach(SessionParts& parts) override { parts.progress.step = step_; }

 private:
  int64_t step_;
};

std::vector<bool> kept_now(SmallModel& model) {
  std::vector<bool> kept;
  for (int64_t i = 0; i < model->layer_drop->layers(); ++i) kept.push_back(model->layer_drop->keeps(i));
  return kept;
}

}  // namespace

TEMPLATE_TEST_CASE("a layer dropped in all micro-steps has a gradient of exactly zero",
                   "[session][layer_drop]", FusedAdamW, torch::optim::AdamW) {
  auto model = small_model_with_gates(early_drops()), twin = small_model_with_gates(early_drops());
  const auto options = OptionsOf<TestType>(0.01).weight_decay(0.1);
  TestType optimizer(model->parameters(), options), peer(twin->parameters(), options);
  Session session(*model, optimizer);
  std::vector<Tensor> seen;
  session.use(model->layer_drop).use(GradientAccumulation(2)).use(GradientProbe(model->parameters(), seen));
  int always_dropped = 0, kept_first_only = 0;
  for (int64_t step = 0; step < 20; ++step) {
    CAPTURE(step);
    std::vector<bool> kept_once(kGatedLayers, false), kept_last;
    for (int64_t m = 0; m < 2; ++m) {
      const auto batch = small_batch(2 * step + m);
      auto [x, y] = session.begin(batch.first, batch.second);
      session.backward(model->loss(x, y));
      session.step();
      // The same by hand.
      Progress progress;
      progress.step = step;
      progress.micro_step = m;
      progress.micro_steps = 2;
      twin->layer_drop->set_progress(progress);
      kept_last = kept_now(twin);
      for (size_t i = 0; i < kGatedLayers; ++i) kept_once[i] = kept_once[i] || kept_last[i];
      twin->loss(batch.first, batch.second).backward();
    }
    for (size_t i = 0; i < kGatedLayers; ++i) {
      auto& block = twin->blocks[i];
      kept_first_only += kept_once[i] && !kept_last[i];
      always_dropped += !kept_once[i];
      REQUIRE(block->weight.grad().defined() == kept_once[i]);
      if (kept_once[i]) continue;
      for (const Tensor& parameter : block->parameters()) {
        parameter.mutable_grad() = torch::zeros_like(parameter).detach();
      }
    }
    const std::vector<Tensor> parameters = twin->parameters();
    REQUIRE(seen.size() == parameters.size());
    for (size_t i = 0; i < seen.size(); ++i) REQUIRE(same_bits(seen[i], parameters[i].grad()));
    const at::NoGradGuard no_grad;
    for (const Tensor& parameter : parameters) parameter.grad().mul_(0.5);
    peer.step();
    peer.zero_grad();
    REQUIRE(same_bits(model->parameters(), parameters));
    for (const Tensor& parameter : model->parameters()) REQUIRE_FALSE(parameter.grad().defined());
  }
  CHECK(always_dropped > 5);
  CHECK(kept_first_only > 5);
}

TEST_CASE("with a schedule by tokens, gates and zeroed gradients decide alike", "[session][layer_drop]") {
  constexpr int64_t kSteps = 20, kTokens = kSteps * 2 * 2 * kFullLength;
  const auto falling = warmup_linear(LearningRateScheduleOptions().total_tokens(kTokens));
  auto model = small_model_with_gates(LayerDropOptions().theta_bar(0.1).schedule(falling));
  FusedAdamW optimizer(model->parameters());
  Session session(*model, optimizer);
  std::vector<Tensor> weights, seen;
  for (const auto& block : model->blocks) weights.push_back(block->weight);
  session.use(model->layer_drop).use(GradientAccumulation(2)).use(GradientProbe(weights, seen));
  int64_t dropped_early = 0, dropped_late = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    const Progress window = session.progress();
    std::vector<bool> kept_once(kGatedLayers, false);
    for (int64_t m = 0; m < 2; ++m) {
      const auto batch = small_batch(2 * step + m);
      auto [x, y] = session.begin(batch.first, batch.second);
      const std::vector<bool> kept = kept_now(model);
      for (size_t i = 0; i < kGatedLayers; ++i) {
        kept_once[i] = kept_once[i] || kept[i];
        (step < kSteps / 2 ? dropped_early : dropped_late) += !kept[i];
      }
      session.backward(model->loss(x, y));
      session.step();
    }
    for (size_t i = 0; i < kGatedLayers; ++i) REQUIRE((count_true(seen[i] != 0) > 0) == kept_once[i]);
    const auto dropped = std::count(kept_once.begin(), kept_once.end(), false);
    REQUIRE(static_cast<int64_t>(model->layer_drop.hook()->unused(window).size()) == 2 * dropped);
  }
  CHECK(dropped_early > 2 * dropped_late);
}

TEMPLATE_TEST_CASE("moments of a dropped layer decay, and so do its weights", "[session][layer_drop]",
                   FusedAdamW, torch::optim::AdamW) {
  auto model = small_model_with_gates(early_drops());
  TestType optimizer(model->parameters(), OptionsOf<TestType>(0.01).weight_decay(0.1).betas({0.8, 0.9}));
  Session session(*model, optimizer);
  session.use(model->layer_drop);
  const Tensor weight = model->blocks[2]->weight;
  int checked = 0;
  for (int64_t step = 0; step < 12; ++step) {
    const auto batch = small_batch(step);
    auto [x, y] = session.begin(batch.first, batch.second);
    const bool kept = model->layer_drop->keeps(2);
    session.backward(model->loss(x, y));
    if (step == 0) {
      REQUIRE(kept);
      session.step();
      continue;
    }
    const Tensor old_weight = weight.detach().to(at::kDouble);
    const Tensor m = state_of(optimizer, weight).exp_avg().to(at::kDouble);
    const Tensor v = state_of(optimizer, weight).exp_avg_sq().to(at::kDouble);
    session.step();
    if (kept) continue;
    ++checked;
    // One rounding each of numbers below 1.
    CHECK(distance(state_of(optimizer, weight).exp_avg(), m * 0.8) < 1e-7);
    CHECK(distance(state_of(optimizer, weight).exp_avg_sq(), v * 0.9) < 1e-7);
    const auto t = static_cast<double>(step + 1);
    const Tensor update =
        m * 0.8 / (1 - std::pow(0.8, t)) / ((v * 0.9 / (1 - std::pow(0.9, t))).sqrt() + 1e-8);
    CHECK(distance(weight, old_weight * (1 - 0.001) - 0.01 * update) < 1e-6);
    CHECK(distance(weight, old_weight) > 1e-4);
  }
  CHECK(checked >= 4);
}

TEST_CASE("a parameter that two layers share counts as dropped where both are", "[session][layer_drop]") {
  GatedStack model(std::vector<int64_t>{0, 1, 0});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  Session session(*model, optimizer);
  std::vector<Tensor> seen;
  session.use(model->layer_drop)
      .use(GradientProbe({model->blocks[0]->weight, model->blocks[1]->weight}, seen));
  int both_dropped = 0, alone_dropped = 0;
  for (int step = 0; step < 40; ++step) {
    auto [x] = session.begin(torch::ones({2, kWidth}));
    const auto& gates = model->layer_drop;
    const bool shared_kept = gates->keeps(0) || gates->keeps(2), alone_kept = gates->keeps(1);
    const auto dropped = gates->dropped_parameters(session.progress());
    const auto drops = [&](const Tensor& parameter) {
      return std::count_if(dropped.begin(), dropped.end(),
                           [&](const Tensor& p) { return p.is_same(parameter); });
    };
    REQUIRE(drops(model->blocks[0]->weight) == !shared_kept);
    REQUIRE(drops(model->blocks[1]->weight) == !alone_kept);
    session.backward(model->loss(x));
    session.step();
    REQUIRE(seen[0].defined());
    REQUIRE(seen[1].defined());
    if (!shared_kept) REQUIRE(count_true(seen[0] != 0) == 0);
    if (!alone_kept) REQUIRE(count_true(seen[1] != 0) == 0);
    both_dropped += !shared_kept;
    alone_dropped += !alone_kept;
  }
  CHECK(both_dropped > 3);
  CHECK(alone_dropped > 3);
}

TEST_CASE("ranks that drop both layers of a shared parameter train as one rank does",
          "[session][layer_drop]") {
  const auto trained = [](int ranks, bool unused_is_zero) {
    int both_dropped = 0;  // on rank 0, whose layers are dropped where those of the others are
    std::vector<GatedStack> models;
    for (int rank = 0; rank < ranks; ++rank) models.emplace_back(std::vector<int64_t>{0, 1, 0});
    const auto worlds = Communicator::in_process(ranks);
    const auto messages = run_ranks(ranks, [&](int rank) {
      GatedStack& model = models[static_cast<size_t>(rank)];
      FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01).weight_decay(0.1));
      Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
      session.use(DataParallel(DataParallelOptions().unused_is_zero(unused_is_zero))).use(model->layer_drop);
      for (int step = 0; step < 20; ++step) {
        auto [x] = session.begin(torch::ones({2, kWidth}));
        if (rank == 0) both_dropped += !model->layer_drop->keeps(0) && !model->layer_drop->keeps(2);
        session.backward(model->loss(x));
        session.step();
      }
      session.finish();
    });
    CHECK(first_of(messages) == "");
    CHECK(both_dropped > 3);
    return models.front()->parameters();
  };
  const auto alone = trained(1, false);
  for (const bool unused_is_zero : {false, true}) {
    CHECK(same_bits(alone, trained(1, unused_is_zero)));
    CHECK(same_bits(alone, trained(2, unused_is_zero)));
  }
}

TEST_CASE("a dropped layer's parameter that is used elsewhere keeps the gradient from there",
          "[session][layer_drop]") {
  GatedStack model(std::vector<int64_t>{0, 1});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  Session session(*model, optimizer);
  std::vector<Tensor> seen;
  session.use(model->layer_drop).use(GradientProbe(model->blocks[1]->parameters(), seen));
  int dropped = 0;
  for (int step = 0; step < 20; ++step) {
    auto [x] = session.begin(torch::ones({2, kWidth}));
    session.backward(model->loss(x) + model->blocks[1]->weight.sum());
    session.step();
    if (keeps_layer(early_drops(), 1, 2, gate_progress(step))) continue;
    ++dropped;
    CHECK(seen[0].equal(torch::ones_like(seen[0])));
    CHECK(seen[1].equal(torch::zeros_like(seen[1])));
  }
  CHECK(dropped > 5);
}

TEST_CASE("a layer counts as dropped where it was in every micro-step of the window",
          "[session][layer_drop]") {
  GatedStack model(std::vector<int64_t>{0, 1});
  CHECK(model->layer_drop->add() == 2);  // without parameters
  int counted = 0, not_counted = 0;
  Progress window;
  for (window.step = 0; window.step < 60; ++window.step) {
    for (window.micro_steps = 1; window.micro_steps <= 3; ++window.micro_steps) {
      std::vector<Tensor> expected;
      double kept = 0;
      for (int64_t i = 0; i < 3; ++i) {
        int64_t runs = 0;
        for (int64_t m = 0; m < window.micro_steps; ++m)
          runs += keeps_layer(early_drops(), i, 3, gate_progress(window.step, m));
        kept += static_cast<double>(runs) / static_cast<double>(window.micro_steps);
        if (runs > 0 || i == 2) continue;
        expected.push_back(model->blocks[static_cast<size_t>(i)]->weight);
        expected.push_back(model->blocks[static_cast<size_t>(i)]->bias);
      }
      const auto dropped = model->layer_drop->dropped_parameters(window);
      REQUIRE(dropped.size() == expected.size());
      for (size_t i = 0; i < dropped.size(); ++i) REQUIRE(dropped[i].is_same(expected[i]));
      REQUIRE(std::abs(model->layer_drop->kept_layers(window) - kept) < 1e-12);
      counted += !expected.empty();
      not_counted += expected.empty();
    }
  }
  CHECK(counted > 20);
  CHECK(not_counted > 20);
}

TEST_CASE("a Session refuses a LayerDrop that could not work", "[session][layer_drop]") {
  auto model = small_model_with_gates(early_drops());
  torch::optim::AdamW optimizer(model->parameters());
  {
    Session session(*model, optimizer);
    LayerDrop stranger(early_drops());
    stranger->add();
    CHECK(contains(refusal([&] { session.use(stranger); }), "no part of the model"));
    CHECK(contains(refusal([&] { session.use(LayerDrop(nullptr)); }), "empty LayerDrop"));
    CHECK_FALSE(stranger->is_in_use());
    // The model's own one was not given to the Session.
    CHECK(contains(refusal([&] {
                     (void)session.begin(torch::ones({1, 2}, at::kLong));
                   }),
                   "session.use(layer_drop)"));
    session.use(model->layer_drop);
    Session other(*model, optimizer);
    CHECK(contains(refusal([&] { other.use(model->layer_drop); }), "another Session"));
    CHECK(contains(refusal([&] { session.use(model->layer_drop); }), "already has the hook layer_drop"));
    CHECK(model->layer_drop->is_in_use());
  }
  // A Session that has ended gives it back.
  Session next(*model, optimizer);
  next.use(model->layer_drop);

  auto no_layers = small_model_with_gates(early_drops(), 0, 0);
  torch::optim::AdamW its_optimizer(no_layers->parameters());
  Session session(*no_layers, its_optimizer);
  CHECK(contains(refusal([&] { session.use(no_layers->layer_drop); }), "no layers"));
  CHECK_FALSE(no_layers->layer_drop->is_in_use());

  auto few_layers = small_model_with_gates(LayerDropOptions().last_layers(4));
  torch::optim::AdamW of_few(few_layers->parameters());
  Session last(*few_layers, of_few);
  CHECK(contains(refusal([&] { last.use(few_layers->layer_drop); }), "last_layers of layer dropping is 4"));
}

TEST_CASE("a resumed run draws the same layers", "[session][layer_drop]") {
  const TemporaryFolder folder;
  // The draws of a run up to the given number of micro-steps, from the newest checkpoint on.
  const auto draws_until = [&](int64_t micro_steps, bool with_checkpoints) {
    auto model = small_model_with_gates(early_drops());
    FusedAdamW optimizer(model->parameters());
    Session session(*model, optimizer);
    session.use(model->layer_drop).use(GradientAccumulation(2));
    if (with_checkpoints) {
      const CapturedStderr quiet;
      session.use(Checkpoints(CheckpointsOptions(folder.path()).every(5)));
      session.resume();
    }
    std::vector<std::vector<bool>> draws;
    for (int64_t i = session.progress().step * 2; i < micro_steps; ++i) {
      const auto batch = small_batch(i);
      auto [x, y] = session.begin(batch.first, batch.second);
      draws.push_back(kept_now(model));
      session.backward(model->loss(x, y));
      session.step();
    }
    return draws;
  };
  const auto whole = draws_until(24, false);
  CHECK(draws_until(14, true).size() == 14);
  const auto resumed = draws_until(24, true);
  CHECK(resumed == std::vector<std::vector<bool>>(whole.begin() + 10, whole.end()));
}

// A run that is resumed there begins with a micro-step in which no block runs, and has others that run all.
TEST_CASE("with Recompute, the first micro-step after a start may drop every block",
          "[session][layer_drop]") {
  const auto kept_in = [](int64_t step, int64_t micro_step) {
    int64_t kept = 0;
    for (int64_t i = 0; i < kGatedLayers; ++i) {
      kept += keeps_layer(early_drops(), i, kGatedLayers, gate_progress(step, micro_step));
    }
    return kept;
  };
  int64_t step = 0;
  while (kept_in(step, 0) != 0 || kept_in(step, 1) != kGatedLayers) ++step;

  SmallModel model = small_model_with_gates(early_drops());
  torch::optim::AdamW optimizer(model->parameters());
  Session session(*model, optimizer);
  session.use(StartAt(step)).use(model->layer_drop).use(Recompute(model->stack)).use(GradientAccumulation(2));
  for (int64_t i = 0; i < 2; ++i) {
    const auto batch = small_batch(i);
    auto [x, y] = session.begin(batch.first, batch.second);
    session.backward(model->loss(x, y));
    session.step();
  }
  CHECK(session.progress().step == step + 1);
}

TEST_CASE("with Recompute, a forward that goes around Blocks::run is an error",
          "[session][layer_drop][mistakes]") {
  SmallModel model = small_model_with_gates(early_drops());
  torch::optim::AdamW optimizer(model->parameters());
  Session session(*model, optimizer);
  session.use(model->layer_drop).use(Recompute(model->stack));  // nothing is dropped in step 0
  const auto batch = small_batch(0);
  auto [x, y] = session.begin(batch.first, batch.second);
  REQUIRE_THROWS_WITH(session.backward(model->head->weight.sum()),
                      Catch::Matchers::ContainsSubstring("forward ran no block through Blocks::run"));
}

}  // namespace pacer::testing
