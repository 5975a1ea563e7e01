// FactorLR: the rates an optimizer really has before each step, at resume, and what is refused.
#include <limits>

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <pacer/core/error.h>
#include <pacer/schedulers/factor_lr.h>

#include "support/catch.h"

namespace pacer::testing {
namespace {

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;

torch::optim::OptimizerParamGroup sgd_group(double rate) {
  return {{torch::zeros({2})}, std::make_unique<torch::optim::SGDOptions>(rate)};
}

// Two groups, of base rates 1 and 10.
torch::optim::SGD two_group_sgd() { return torch::optim::SGD({sgd_group(1), sgd_group(10)}, {1}); }

double rate_of(const torch::optim::Optimizer& optimizer, size_t group) {
  return optimizer.param_groups()[group].options().get_lr();
}

}  // namespace

TEST_CASE("the rates before each step are the schedule's, from the first step on",
          "[schedulers][factor_lr]") {
  torch::optim::SGD optimizer = two_group_sgd();
  FactorLR scheduler(optimizer, warmup_linear({4, 8}));
  const double expected[] = {0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0, 0};
  for (int64_t step = 0; step < 10; ++step) {
    CHECK(scheduler.steps() == step);
    CHECK(rate_of(optimizer, 0) == expected[step]);
    CHECK(rate_of(optimizer, 1) == 10 * expected[step]);
    scheduler.step();
  }
  CHECK(scheduler.base_lrs() == std::vector<double>{1, 10});
}

TEST_CASE("the first optimizer step is taken at the schedule's rate", "[schedulers][factor_lr]") {
  auto parameter = torch::zeros({3});
  torch::optim::SGD optimizer({parameter}, {1});
  FactorLR scheduler(optimizer, constant_schedule({4}));
  parameter.mutable_grad() = torch::ones({3});
  optimizer.step();
  CHECK(parameter[1].item<float>() == -0.25f);
  scheduler.step();
  optimizer.step();
  CHECK(parameter[1].item<float>() == -0.75f);
}

TEST_CASE("a scheduler resumed at a step goes on like one that got there", "[schedulers][factor_lr]") {
  torch::optim::SGD walked = two_group_sgd(), resumed = two_group_sgd();
  FactorLR walking(walked, warmup_cosine({3, 20})), resuming(resumed, warmup_cosine({3, 20}));
  for (int step = 0; step < 7; ++step) walking.step();
  resuming.resume_at(walking.steps());
  for (int step = 7; step < 25; ++step) {
    REQUIRE(resuming.steps() == walking.steps());
    REQUIRE(rate_of(resumed, 0) == rate_of(walked, 0));
    REQUIRE(rate_of(resumed, 1) == rate_of(walked, 1));
    walking.step();
    resuming.step();
  }
  resuming.resume_at(0);
  CHECK(resuming.steps() == 0);
  CHECK(rate_of(resumed, 1) == Approx(10.0 / 3));
}

TEST_CASE("a schedule by tokens is refused before the optimizer is touched", "[schedulers][factor_lr]") {
  torch::optim::SGD optimizer = two_group_sgd();
  const LearningRateSchedule by_tokens = warmup_cosine(LearningRateScheduleOptions(4).total_tokens(1'000));
  CHECK_THROWS_AS(FactorLR(optimizer, by_tokens), InvalidArgument);
  CHECK_THROWS_WITH(FactorLR(optimizer, by_tokens), ContainsSubstring("LearningRate hook"));
  const LearningRateSchedule chain = constant_schedule({4}).then_at_token(100, constant_schedule());
  CHECK_THROWS_WITH(FactorLR(optimizer, chain), ContainsSubstring("nor a part that begins at a token"));
  CHECK_THROWS_AS(FactorLR(optimizer, by_tokens.then(5, constant_schedule())), InvalidArgument);
  CHECK(rate_of(optimizer, 0) == 1);
}

TEST_CASE("a chain by steps goes on inside its parts at resume", "[schedulers][factor_lr]") {
  const LearningRateSchedule chain = warmup_linear({2, 6}).then(4, constant_schedule({4}));
  const double expected[] = {0.5, 1, 1, 0.75, 0.25, 0.5, 0.75, 1, 1};
  for (int64_t from = 0; from < 9; ++from) {
    torch::optim::SGD optimizer = two_group_sgd();
    FactorLR scheduler(optimizer, chain);
    scheduler.resume_at(from);
    for (int64_t step = from; step < 9; ++step) {
      CHECK(rate_of(optimizer, 0) == expected[step]);
      scheduler.step();
    }
  }
}

TEST_CASE("a position that LibTorch cannot count to is refused and changes nothing",
          "[schedulers][factor_lr]") {
  torch::optim::SGD optimizer = two_group_sgd();
  FactorLR scheduler(optimizer, constant_schedule({4}));
  scheduler.step();
  for (const int64_t bad : {int64_t{-1}, (int64_t{1} << 32) - 2, std::numeric_limits<int64_t>::max()}) {
    CHECK_THROWS_AS(scheduler.resume_at(bad), InvalidArgument);
  }
  CHECK(scheduler.steps() == 1);
  CHECK(rate_of(optimizer, 0) == 0.5);
  CHECK_NOTHROW(scheduler.resume_at((int64_t{1} << 32) - 3));
  CHECK(scheduler.steps() == (int64_t{1} << 32) - 3);
}

TEST_CASE("a group added later is refused with the way out", "[schedulers][factor_lr]") {
  torch::optim::SGD optimizer = two_group_sgd();
  FactorLR scheduler(optimizer, constant_schedule({4}));
  optimizer.add_param_group(sgd_group(100));
  CHECK_THROWS_WITH(scheduler.step(), ContainsSubstring("3 parameter groups, but had 2"));
  CHECK_THROWS_AS(scheduler.resume_at(2), InvalidArgument);
  CHECK(scheduler.steps() == 0);
  CHECK(rate_of(optimizer, 0) == 0.25);
  CHECK(rate_of(optimizer, 2) == 100);
}

}  // namespace pacer::testing
