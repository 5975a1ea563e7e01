// The LearningRate hook in a Session: the rate each step is really taken at, whose base it multiplies, that a
// load does not apply a decay twice, and who else may set rates.
#include <cmath>

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/hooks/step_report.h>
#include <pacer/schedulers/factor_lr.h>
#include <pacer/schedulers/learning_rate.h>
#include <pacer/session/session.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/checkpoints/archives.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

// Its loss is the sum of its two numbers, so that SGD moves each by exactly its learning rate.
struct SumModelImpl : torch::nn::Module {
  SumModelImpl()
      : a(register_parameter("a", torch::zeros({}, at::kDouble))),
        b(register_parameter("b", torch::zeros({}, at::kDouble))) {}
  Tensor loss() { return a + b; }
  Tensor a, b;
};
TORCH_MODULE(SumModel);

// Two groups, of rates 1 and 10 times `rate`.
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> groups_of_rates(SumModel& model, double rate) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{model->a}, std::make_unique<Options>(rate));
  groups.emplace_back(std::vector<Tensor>{model->b}, std::make_unique<Options>(10 * rate));
  return groups;
}

void sum_step(Session& session, SumModel& model, int64_t tokens = 1) {
  auto [x] = session.begin(torch::zeros({tokens}));
  session.backward(model->loss());
  session.step();
}

double lr_of_group(const torch::optim::Optimizer& optimizer, size_t group) {
  return optimizer.param_groups()[group].options().get_lr();
}

double step_taken(const Tensor& parameter, double& before) {
  const double now = parameter.item<double>();
  return std::exchange(before, now) - now;
}

// Warm-up over 4 steps, then a line from 1 to 0 at step 12.
double line_factor(int64_t q) {
  const auto k = static_cast<double>(q + 1), x = (static_cast<double>(q) - 4) / 8;
  return k <= 4 ? k / 4 : x >= 1 ? 0 : 1 - x;
}
LearningRateSchedule line_schedule() { return warmup_linear({4, 12}); }

}  // namespace

TEST_CASE("every step is taken at the rate of the schedule, of each group's own base",
          "[session][learning_rate]") {
  SumModel model;
  torch::optim::SGD optimizer(groups_of_rates<torch::optim::SGDOptions>(model, 0.5),
                              torch::optim::SGDOptions(0.5));
  Session session(*model, optimizer);
  session.use(LearningRate(line_schedule()));
  CHECK(lr_of_group(optimizer, 0) == 0.5);  // until the first step
  double a = 0, b = 0;
  for (int64_t q = 0; q < 15; ++q) {
    sum_step(session, model);
    CAPTURE(q);
    CHECK(std::abs(step_taken(model->a, a) - 0.5 * line_factor(q)) < 1e-14);
    CHECK(std::abs(step_taken(model->b, b) - 5.0 * line_factor(q)) < 1e-13);
  }
}

TEST_CASE("cosine, inverse square root and exponential decay reach the optimizer",
          "[session][learning_rate]") {
  const double pi = std::acos(-1.0);
  const auto check = [](const LearningRateSchedule& schedule, const std::function<double(double)>& factor) {
    SumModel model;
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.25));
    Session session(*model, optimizer);
    session.use(LearningRate(schedule));
    for (int64_t q = 0; q < 25; ++q) {
      sum_step(session, model);
      CAPTURE(q);
      CHECK(std::abs(lr_of_group(optimizer, 0) - 0.25 * factor(static_cast<double>(q))) < 1e-15);
    }
  };
  check(warmup_cosine({5, 20}), [&](double q) {
    return q < 5 ? (q + 1) / 5 : q >= 20 ? 0 : std::pow(std::cos(pi * (q - 5) / 30), 2);
  });
  check(warmup_inverse_sqrt({4}), [](double q) { return q < 4 ? (q + 1) / 4 : 2 / std::sqrt(q + 1); });
  check(warmup_exponential(LearningRateScheduleOptions(2).gamma(0.5).every(3)),
        [](double q) { return q < 2 ? (q + 1) / 2 : std::exp2(-std::floor((q - 2) / 3)); });
}

TEST_CASE("a decay by tokens follows the tokens trained before the step", "[session][learning_rate]") {
  SumModel model;
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.5));
  Session session(*model, optimizer);
  session.use(LearningRate(warmup_linear(LearningRateScheduleOptions(2).total_tokens(100))));
  int64_t tokens = 0;
  for (int64_t q = 0; q < 12; ++q) {
    sum_step(session, model, 3 + q);
    const double left = tokens >= 100 ? 0 : 1 - static_cast<double>(tokens) / 100;
    CHECK(std::abs(lr_of_group(optimizer, 0) - 0.5 * (q == 0 ? 0.5 : 1) * left) < 1e-15);
    tokens += 3 + q;
  }
  CHECK(tokens > 100);
}

TEMPLATE_TEST_CASE("a load does not apply the decay twice", "[session][learning_rate]", LearningRate,
                   FactorLR) {
  const auto groups = [](SumModel& model) { return groups_of_rates<FusedAdamWOptions>(model, 0.25); };
  SumModel model, copy;
  FusedAdamW optimizer(groups(model), FusedAdamWOptions(0.25));
  // Three decayed steps, then an archive of the optimizer alone.
  if constexpr (std::is_same_v<TestType, LearningRate>) {
    Session session(*model, optimizer);
    session.use(LearningRate(warmup_inverse_sqrt({1})));
    for (int64_t q = 0; q < 4; ++q) sum_step(session, model);
  } else {
    FactorLR schedule(optimizer, warmup_inverse_sqrt({1}));
    for (int64_t q = 0; q < 3; ++q) schedule.step();
  }
  REQUIRE(lr_of_group(optimizer, 0) == 0.125);
  FusedAdamW loaded(groups(copy), FusedAdamWOptions(0.25));
  load_from(loaded, saved(optimizer));
  REQUIRE(lr_of_group(loaded, 0) == 0.125);
  // A schedule that starts anew multiplies the base and not what was left of it.
  if constexpr (std::is_same_v<TestType, LearningRate>) {
    Session session(*copy, loaded);
    session.use(LearningRate(constant_schedule({2})));
    sum_step(session, copy);
    CHECK(lr_of_group(loaded, 0) == 0.125);
    CHECK(lr_of_group(loaded, 1) == 1.25);
    sum_step(session, copy);
  } else {
    FactorLR schedule(loaded, constant_schedule({2}));
    CHECK(schedule.base_lrs() == std::vector<double>{0.25, 2.5});
    CHECK(lr_of_group(loaded, 0) == 0.125);
    schedule.step();
  }
  CHECK(lr_of_group(loaded, 0) == 0.25);
  CHECK(lr_of_group(loaded, 1) == 2.5);
}

TEST_CASE("one schedule at a time: LearningRate and FactorLR refuse each other", "[session][learning_rate]") {
  SumModel model;
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.5));
  for (int round = 0; round < 2; ++round) {
    {
      Session session(*model, optimizer);
      session.use(LearningRate(constant_schedule()));
      CHECK(
          contains(refusal([&] { FactorLR(optimizer, line_schedule()); }), "LearningRate hook already does"));
      CHECK(contains(refusal([&] { session.use(LearningRate(constant_schedule())); }), "learning_rate"));
      Session other(*model, optimizer);
      CHECK(contains(refusal([&] { other.use(LearningRate(constant_schedule())); }), "already does"));
      sum_step(session, model);
      CHECK(lr_of_group(optimizer, 0) == 0.5);
    }
    {
      FactorLR schedule(optimizer, line_schedule());
      CHECK(lr_of_group(optimizer, 0) == 0.125);
      Session session(*model, optimizer);
      CHECK(contains(refusal([&] { session.use(LearningRate(constant_schedule())); }),
                     "FactorLR already does"));
      CHECK(contains(refusal([&] { FactorLR(optimizer, line_schedule()); }), "already does"));
      CHECK(lr_of_group(optimizer, 0) == 0.125);
      sum_step(session, model);  // the refused hook is not there
      CHECK(lr_of_group(optimizer, 0) == 0.125);
    }
  }
}

TEMPLATE_TEST_CASE("a rate changed behind the hook's back is refused, and nothing is stepped",
                   "[session][learning_rate]", FusedAdamW, torch::optim::AdamW) {
  SumModel model;
  TestType optimizer(groups_of_rates<OptionsOf<TestType>>(model, 0.5), OptionsOf<TestType>(0.5));
  Session session(*model, optimizer);
  session.use(LearningRate(line_schedule()));
  sum_step(session, model);
  optimizer.param_groups()[1].options().set_lr(0.75);
  const Tensor before = model->b.detach().clone();
  auto [x] = session.begin(torch::zeros({1}));
  session.backward(model->loss());
  const std::string message = refusal([&] { session.step(); });
  CHECK(contains(message, "parameter group 1 was changed from 1.25 to 0.75"));
  CHECK(same_bits(model->b, before));
  CHECK(session.progress().step == 1);
  // Put right, the same step can be taken.
  optimizer.param_groups()[1].options().set_lr(1.25);
  CHECK(session.step());
  CHECK(lr_of_group(optimizer, 1) == 2.5);
  CHECK(session.progress().step == 2);
}

TEMPLATE_TEST_CASE("after resume the rates go on", "[session][learning_rate]", FusedAdamW,
                   torch::optim::AdamW) {
  const TemporaryFolder folder;
  for (const bool resumes : {false, true}) {
    SumModel model;
    const double rate = resumes ? 0.9 : 0.5;  // the checkpoint's decides
    TestType optimizer(groups_of_rates<OptionsOf<TestType>>(model, rate), OptionsOf<TestType>(rate));
    Session session(*model, optimizer);
    auto checkpoints = std::make_shared<Checkpoints>(CheckpointsOptions(folder.path()));
    session.use(LearningRate(line_schedule())).use(checkpoints);
    if (resumes) {
      const CapturedStderr quiet;
      REQUIRE(session.resume() == 7);
    }
    for (int64_t q = session.progress().step; q < 12; ++q) {
      if (!resumes && q == 7) checkpoints->save_now();
      sum_step(session, model);
      CHECK(lr_of_group(optimizer, 0) == 0.5 * line_factor(q));
      CHECK(lr_of_group(optimizer, 1) == 5.0 * line_factor(q));
    }
    CHECK(session.progress().step == 12);
  }
}

TEST_CASE("a run that goes on may have another schedule in what has not begun, and in nothing else",
          "[session][learning_rate]") {
  const TemporaryFolder folder;
  const auto stable = [](int64_t total, int64_t decay_steps) {
    return warmup_stable_decay(LearningRateScheduleOptions(2, total).decay_steps(decay_steps));
  };
  const auto resumed = [&](const LearningRateSchedule& schedule, int64_t steps) {
    SumModel model;
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.5));
    Session session(*model, optimizer);
    session.use(LearningRate(schedule)).use(Checkpoints(CheckpointsOptions(folder.path()).every(4)));
    const std::string message = message_of<InvalidArgument>([&] { session.resume(); });
    if (!message.empty()) {
      CHECK(session.progress().step == 0);
      return message;
    }
    while (session.progress().step < steps) sum_step(session, model);
    session.finish();
    return std::to_string(lr_of_group(optimizer, 0));
  };
  CHECK(resumed(stable(20, 10), 8) == "0.500000");
  // Its decay would have begun at step 10. It may begin at once, and by another line, but not earlier.
  CHECK(contains(resumed(stable(20, 14), 8), "would take step 9 at 1 times the base rate"));
  CHECK(contains(resumed(warmup_cosine({2, 20}), 8), "but the schedule of this LearningRate says"));
  CHECK(resumed(warmup_stable_decay(LearningRateScheduleOptions(2, 16).decay_steps(8), Decay::minus_sqrt),
                11) == "0.250000");
  // Checkpoint 11 is in the middle of that decay.
  CHECK(contains(resumed(stable(16, 8), 11), "would take step 12"));
  CHECK(contains(resumed(constant_schedule({2}), 11), "may only change in what has not begun"));
  CHECK(resumed(warmup_stable_decay(LearningRateScheduleOptions(2, 16).decay_steps(8), Decay::minus_sqrt),
                13) != "0.250000");
}

TEST_CASE("a chain of schedules reaches the optimizer, and goes on where it was inside a part",
          "[session][learning_rate]") {
  const auto chain_with = [](int64_t end_of_second, double gamma) {
    return constant_schedule({2})
        .then(4, warmup_linear({2, end_of_second}))
        .then(9, warmup_exponential(LearningRateScheduleOptions().gamma(gamma)));
  };
  const double factors[] = {0.5, 1, 1, 1, 0.5, 1, 1, 0.75, 0.5, 1, 0.5, 0.25};
  const TemporaryFolder folder;
  // Goes on with the run up to that step; returns what is refused.
  const auto run_until = [&](int64_t until, const LearningRateSchedule& schedule) {
    SumModel model;
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.5));
    Session session(*model, optimizer);
    session.use(LearningRate(schedule)).use(Checkpoints(CheckpointsOptions(folder.path())));
    const std::string message = message_of<InvalidArgument>([&] { session.resume(); });
    if (!message.empty()) return message;
    for (int64_t q = session.progress().step; q < until; ++q) {
      CAPTURE(until, q);
      sum_step(session, model);
      CHECK(lr_of_group(optimizer, 0) == 0.5 * factors[q]);
    }
    CHECK(session.progress().step == until);
    session.finish();
    return message;
  };
  const CapturedStderr quiet;
  for (const int64_t until : {5, 8}) CHECK(run_until(until, chain_with(6, 0.1)) == "");
  // Another second part, and another third, which has not begun.
  CHECK(contains(run_until(9, chain_with(7, 0.5)), "would take step 9 at 0.5 times the base rate"));
  CHECK(contains(run_until(9, chain_with(7, 0.5)), "; from step 4 on warmup_linear"));
  for (const int64_t until : {10, 12}) CHECK(run_until(until, chain_with(6, 0.5)) == "");
}

TEST_CASE("a part of a chain begins at the token that it was given", "[session][learning_rate]") {
  SumModel model;
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.5));
  Session session(*model, optimizer);
  session.use(LearningRate(constant_schedule({2}).then_at_token(
      20, warmup_linear(LearningRateScheduleOptions().total_tokens(16)))));
  const double factors[] = {0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0};  // of 4 tokens each
  for (const double factor : factors) {
    sum_step(session, model, 4);
    CHECK(lr_of_group(optimizer, 0) == 0.5 * factor);
  }
}

TEST_CASE("the report has the rate of the first group", "[session][learning_rate]") {
  class Reader : public Hook {
   public:
    explicit Reader(double& rate) : rate_(&rate) {}
    std::string hook_name() const override { return "reader"; }
    Slot slot() const override { return Slot::record; }
    void after_step(StepReport& report) override {
      for (const auto& [name, value] : report.numbers()) {
        if (name == "learning_rate") *rate_ = value;
      }
    }

   private:
    double* rate_;
  };
  SumModel model;
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  Session session(*model, optimizer);
  double rate = 0;
  session.use(Reader(rate)).use(LearningRate(line_schedule()));
  sum_step(session, model);
  CHECK(rate == 0.125);
}

TEST_CASE("a LearningRate hook may outlive its optimizer", "[session][learning_rate]") {
  const auto hook = std::make_shared<LearningRate>(warmup_cosine({1, 10}));
  {
    SumModel model;
    FusedAdamW optimizer(model->parameters());
    Session session(*model, optimizer);
    session.use(hook);
  }
  CHECK(hook.use_count() == 1);
}

}  // namespace pacer::testing
