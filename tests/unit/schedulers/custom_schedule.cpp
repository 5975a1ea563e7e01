// Schedules that are functions of the user's: as the whole of a run, as parts of chains, through LearningRate, FactorLR
// and Vary, and what is refused of them.
#include <cmath>
#include <limits>
#include <stdexcept>

#include <torch/optim/sgd.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/schedulers/factor_lr.h>
#include <pacer/schedulers/learning_rate.h>
#include <pacer/schedulers/vary.h>
#include <pacer/session/session.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/temporary_folder.h"

namespace pacer::testing::custom_schedule_tests {
namespace {

double factor_at(const LearningRateSchedule& schedule, int64_t step, int64_t tokens = 0) {
  Progress progress;
  progress.step = step;
  progress.tokens = tokens;
  return schedule.factor(progress);
}

// 2, 1.5, 4 / 3, ...: above 1 and never 0.
double falling(int64_t progress) { return 1 + 1 / static_cast<double>(progress + 1); }

// Its loss is its number, so that SGD moves it by exactly the learning rate.
struct NumberImpl : torch::nn::Module {
  NumberImpl() : a(register_parameter("a", torch::zeros({}, at::kDouble))) {}
  at::Tensor a;
};
TORCH_MODULE(Number);

struct Run {
  explicit Run(const LearningRateSchedule& schedule)
      : optimizer(model->parameters(), torch::optim::SGDOptions(0.5)), session(*model, optimizer) {
    session.use(LearningRate(schedule));
  }
  double rate() const { return optimizer.param_groups()[0].options().get_lr(); }
  void step(int64_t tokens = 1) {
    (void)session.begin(torch::zeros({tokens}));
    session.backward(model->a * 1);
    session.step();
  }
  Number model;
  torch::optim::SGD optimizer;
  Session session;
};

}  // namespace

TEST_CASE("a schedule may be a function of steps or of tokens", "[schedulers][rate]") {
  const LearningRateSchedule steps = custom_schedule(falling), tokens = custom_schedule_by_tokens(falling);
  for (const int64_t q : {int64_t{0}, int64_t{1}, int64_t{7}, std::numeric_limits<int64_t>::max() - 1}) {
    CHECK(factor_at(steps, q, 3) == falling(q));
    CHECK(factor_at(tokens, 3, q) == falling(q));
  }
  CHECK_FALSE(steps.by_tokens());
  CHECK(tokens.by_tokens());
  CHECK(steps.warmup_ended({}));
  CHECK_FALSE(steps.has_ended({}));
  CHECK_FALSE(steps.steps_until_zero());
}

TEST_CASE("a function counts from where its part of a chain begins", "[schedulers][rate]") {
  const LearningRateSchedule chain =
      warmup_linear({2, 10}).then(10, custom_schedule(falling)).then(20, constant_schedule());
  CHECK(factor_at(chain, 0) == 0.5);
  CHECK(factor_at(chain, 10) == 2);
  CHECK(factor_at(chain, 19) == falling(9));
  CHECK(factor_at(chain, 20) == 1);
  const LearningRateSchedule by_tokens =
      constant_schedule().then_at_token(100, custom_schedule_by_tokens(falling));
  CHECK(factor_at(by_tokens, 5, 99) == 1);
  CHECK(factor_at(by_tokens, 5, 103) == falling(3));
}

TEST_CASE("functions are told apart by their values", "[schedulers][rate]") {
  const auto a = custom_schedule(falling).describe();
  CHECK(a == custom_schedule([](int64_t q) { return falling(q); }).describe());
  CHECK(a != custom_schedule_by_tokens(falling).describe());
  // At one step alone, and by a rounding.
  CHECK(a != custom_schedule([](int64_t q) {
               return q == 1'000 ? std::nextafter(falling(q), 2) : falling(q);
             }).describe());
  CHECK(constant_schedule().then(5, custom_schedule(falling)).describe() !=
        constant_schedule().then(5, custom_schedule([](int64_t) { return 1.0; })).describe());
}

TEST_CASE("a function sets the rate of each step, and a resumed run goes on with it",
          "[session][learning_rate]") {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  const auto saving = [&](Run& run) {
    run.session.use(Checkpoints(CheckpointsOptions(folder.path()).every(4)));
  };
  Run run(custom_schedule_by_tokens(falling));
  saving(run);
  int64_t tokens = 0;
  for (int64_t q = 0; q < 4; ++q) {
    run.step(3 + q);
    CHECK(run.rate() == 0.5 * falling(tokens));
    tokens += 3 + q;
  }
  run.session.finish();

  Run resumed(custom_schedule_by_tokens(falling));
  saving(resumed);
  REQUIRE(resumed.session.resume() == 4);
  resumed.step();
  CHECK(resumed.rate() == 0.5 * falling(tokens));
  Run other(custom_schedule_by_tokens([](int64_t q) { return falling(q) + 1e-9; }));
  saving(other);
  CHECK(contains(message_of([&] { other.session.resume(); }),
                 "a schedule may only change in what has not begun"));
}

TEST_CASE("a factor that is no number, or negative, is refused, and the step can be taken again",
          "[session][learning_rate]") {
  for (const double bad : {std::nan(""), HUGE_VAL, -0.25}) {
    CAPTURE(bad);
    double factor = 0.5;
    Run run(custom_schedule([&](int64_t) { return factor; }));
    run.step();
    const double before = run.model->a.item<double>();
    factor = bad;
    const std::string message = message_of([&] { run.step(); });
    CHECK(contains(message, "custom_schedule gave "));
    CHECK(contains(message, " at step 1; a factor of the learning rate is finite and not negative"));
    CHECK(run.model->a.item<double>() == before);
    CHECK(run.rate() == 0.25);
    factor = 2;
    run.session.step();
    CHECK(run.model->a.item<double>() == before - 1);
  }
}

TEST_CASE("what a function throws comes out of the step, which can be taken again",
          "[session][learning_rate]") {
  bool fails = true;
  Run run(custom_schedule([&](int64_t) { return fails ? throw std::runtime_error("no rate today") : 1.0; }));
  for (int64_t q = 0; q < 2; ++q) {
    fails = true;
    CHECK(contains(message_of([&] { run.step(); }), "no rate today"));
    fails = false;
    run.session.step();
    CHECK(run.model->a.item<double>() == -0.5 * static_cast<double>(q + 1));
  }
}

TEST_CASE("a custom schedule refuses what it is not", "[schedulers][rate]") {
  CHECK(
      contains(message_of([] { custom_schedule(nullptr); }), "custom_schedule was given an empty function"));
  CHECK(contains(message_of([] { custom_schedule_by_tokens({}); }),
                 "custom_schedule_by_tokens was given an empty"));
  for (const Decay decay : {Decay::custom, Decay::custom_by_tokens}) {
    CHECK(contains(message_of([&] { LearningRateSchedule(decay, LearningRateScheduleOptions()); }),
                   "is made by custom_schedule or custom_schedule_by_tokens"));
  }
  CHECK(
      contains(message_of([] { constant_schedule().then(5, custom_schedule_by_tokens(falling)); }),
               "custom_schedule_by_tokens follows tokens, but the token at which step 5 comes is not known"));
  CHECK(contains(message_of([] { constant_schedule().then_at_token(5, custom_schedule(falling)); }),
                 "has a warm-up or a decay by steps"));
  Number model;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5));
  CHECK(contains(message_of([&] { FactorLR(optimizer, custom_schedule_by_tokens(falling)); }),
                 "FactorLR learns nothing of tokens"));
  FactorLR by_steps(optimizer, custom_schedule(falling));
  CHECK(optimizer.param_groups()[0].options().get_lr() == 1);
}

TEST_CASE("Vary follows a function between its ends, and not beyond", "[session][vary]") {
  Run run(constant_schedule());
  double factor = 0.25, seen = 0;
  run.session.use(Vary(VaryOptions("dropout").at_one(0.5).at_zero(0.1),
                       custom_schedule([&](int64_t) { return factor; }),
                       [&](double value) { seen = value; }));
  run.step();
  CHECK(seen == 0.1 + (0.5 - 0.1) * 0.25);
  factor = 1.5;
  CHECK(
      contains(message_of([&] { run.step(); }), "gave the factor 1.5 at step 1, which leads beyond at_one"));
}

}  // namespace pacer::testing::custom_schedule_tests
