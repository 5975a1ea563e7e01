// The curriculum of attention's window in a Session: when it is in force, that batches stay whole, what is
// recorded, and what is refused.
#include <torch/optim/sgd.h>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/step_report.h>
#include <pacer/schedulers/window_length.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/session/small_model.h"

namespace pacer::testing {
namespace {

using Length = std::optional<int64_t>;

LengthSchedule ten_steps() { return LengthSchedule(2, 16).ramp_steps(10).difficulty_step(1); }

struct WindowRun {
  explicit WindowRun(bool asks = true) : optimizer(model->parameters(), 0.1), session(*model, optimizer) {
    model->uses_window = asks;
  }
  void step(int64_t i) {
    const auto batch = small_batch(i);
    auto [x, y] = session.begin(batch.first, batch.second);
    REQUIRE(x.sizes() == batch.first.sizes());
    during = model->window.length();
    session.backward(model->loss(x, y));
    after = model->window.length();
    session.step();
  }
  SmallModel model = small_model();
  torch::optim::SGD optimizer;
  Session session;
  Length during, after;
};

struct WindowRecorder : Hook {
  std::string hook_name() const override { return "window_recorder"; }
  Slot slot() const override { return Slot::record; }
  void after_step(StepReport& report) override {
    for (const auto& [name, value] : report.numbers()) {
      if (name == "window") values.push_back(value);
    }
  }
  std::vector<double> values;
};

}  // namespace

TEST_CASE("the window grows in the forward passes of training, and batches stay whole", "[session][window]") {
  WindowRun run;
  const auto recorder = std::make_shared<WindowRecorder>();
  run.session.use(WindowLength(run.model->window, ten_steps())).use(recorder);
  for (int64_t step = 0; step < 12; ++step) {
    run.step(step);
    const int64_t expected = std::min<int64_t>(16, 2 + 14 * step / 10);
    CHECK(run.during == expected);
    CHECK(run.after == std::nullopt);
    REQUIRE(recorder->values.size() == static_cast<size_t>(step + 1));
    CHECK(recorder->values.back() == static_cast<double>(expected));
  }
  CHECK(run.session.progress().tokens == 12 * 2 * kFullLength);
}

TEST_CASE("a step with a window is one with the window set by hand, to the bit", "[session][window]") {
  for (const WindowForm form : {WindowForm::blocks, WindowForm::sliding}) {
    WindowRun run, twin;
    run.model->window = twin.model->window = AttentionWindow(form);
    twin.model->window = AttentionWindow(form);
    run.session.use(WindowLength(run.model->window, ten_steps()));
    torch::optim::SGD peer(twin.model->parameters(), 0.1);
    for (int64_t step = 0; step < 12; ++step) {
      run.step(step);
      const auto batch = small_batch(step);
      twin.model->window.set_length(std::min<int64_t>(16, 2 + 14 * step / 10));
      peer.zero_grad();
      twin.model->loss(batch.first, batch.second).backward();
      peer.step();
      REQUIRE(same_bits(run.model->parameters(), twin.model->parameters()));
    }
  }
}

TEST_CASE("evaluation, prewarm and passes of the loop's own see the whole sequence", "[session][window]") {
  WindowRun run;
  run.session.use(WindowLength(run.model->window, ten_steps()));
  const auto batch = small_batch(0);
  Length inside = 1;
  const auto look = [&] {
    inside = run.model->window.length();
    return run.model->loss(batch.first, batch.second);
  };
  run.session.prewarm(look);
  CHECK(inside == std::nullopt);
  run.step(0);
  CHECK(run.during == 2);
  inside = 1;
  run.session.evaluate(look);
  CHECK(inside == std::nullopt);
  inside = 1;
  look();
  CHECK(inside == std::nullopt);
  run.session.prewarm(look);
  CHECK(inside == std::nullopt);
  // A forward pass that throws leaves no window behind.
  try {
    auto [x, y] = run.session.begin(batch.first, batch.second);
    throw std::runtime_error("forward");
  } catch (const std::runtime_error&) {
  }
  CHECK(run.model->window.length() == std::nullopt);
}

TEST_CASE("all micro-steps of a step have one window, by steps and by tokens", "[session][window]") {
  WindowRun run;
  run.session.use(GradientAccumulation(3))
      .use(WindowLength(run.model->window, LengthSchedule(2, 16).ramp_tokens(960).difficulty_step(1)));
  for (int64_t i = 0; i < 36; ++i) {
    run.step(i);
    CHECK(run.during == std::min<int64_t>(16, 2 + 14 * (i / 3 * 96) / 960));
  }
}

TEST_CASE("an evaluation between two micro-steps sees the whole sequence", "[session][window]") {
  WindowRun run;
  run.session.use(GradientAccumulation(2)).use(WindowLength(run.model->window, ten_steps()));
  const auto batch = small_batch(0);
  run.step(0);
  REQUIRE(run.session.progress().micro_step == 1);
  Length inside = 1;
  run.session.evaluate([&] {
    inside = run.model->window.length();
    return run.model->forward(batch.first);
  });
  CHECK(inside == std::nullopt);
  run.step(1);
  CHECK(run.during == 2);
}

TEST_CASE("a model that never asks for its window is refused in its first step", "[session][window]") {
  WindowRun run(/*asks=*/false);
  run.session.use(WindowLength(run.model->window, ten_steps()));
  const auto batch = small_batch(0);
  auto [x, y] = run.session.begin(batch.first, batch.second);
  run.session.backward(run.model->loss(x, y));
  CHECK(contains(refusal([&] { run.session.step(); }), "has not asked this AttentionWindow"));
}

TEST_CASE("a window is one Session's, and free once that has ended", "[session][window]") {
  AttentionWindow window;
  {
    WindowRun one, other;
    one.session.use(WindowLength(window, ten_steps()));
    CHECK(contains(refusal([&] { other.session.use(WindowLength(window, ten_steps())); }),
                   "in use by another Session"));
  }
  WindowRun next;
  next.session.use(WindowLength(window, ten_steps()));
  CHECK(contains(refusal([&] { WindowLength(window, LengthSchedule(4, 16)); }), "no way from 4 to 16"));
}

TEST_CASE("ranks compare form and schedule of a window, which settles with its schedule",
          "[session][window]") {
  const AttentionWindow blocks, sliding(WindowForm::sliding);
  const WindowLength hook(blocks, ten_steps());
  CHECK(hook.agreement() == "in blocks, 2 to 16 over 10 steps, root 1, in multiples of 1");
  CHECK(WindowLength(sliding, ten_steps()).agreement().rfind("sliding, ", 0) == 0);
  Progress progress;
  progress.step = 9;
  CHECK_FALSE(hook.settled(progress));
  progress.step = 10;
  CHECK(hook.settled(progress));
}

}  // namespace pacer::testing
