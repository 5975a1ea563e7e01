// The LearningRate hook with a schedule for some of the parameter groups.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/sgd.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/hooks/step_report.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/schedulers/learning_rate.h>
#include <pacer/session/session.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace pacer::testing::learning_rate_groups {
namespace {

struct ThreeNumbersImpl : torch::nn::Module {
  ThreeNumbersImpl() {
    for (const char* name : {"a", "b", "c"}) {
      numbers.push_back(register_parameter(name, torch::zeros({}, at::kDouble)));
    }
  }
  at::Tensor loss() const { return numbers[0] + numbers[1] + numbers[2]; }
  std::vector<at::Tensor> numbers;
};
TORCH_MODULE(ThreeNumbers);

// A group of each number, with the base rates 1, 10 and 100.
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> groups_of(const ThreeNumbers& model) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  double rate = 1;
  for (const at::Tensor& number : model->numbers) {
    groups.emplace_back(std::vector<at::Tensor>{number}, std::make_unique<Options>(rate));
    rate *= 10;
  }
  return groups;
}

void step(Session& session, const ThreeNumbers& model) {
  (void)session.begin(torch::zeros({1}));
  session.backward(model->loss());
  session.step();
}

double rate_of(const torch::optim::Optimizer& optimizer, size_t group) {
  return optimizer.param_groups()[group].options().get_lr();
}

LearningRate by_groups() {
  return LearningRate(constant_schedule()).group(1, warmup_linear({0, 4})).group(2, constant_schedule({2}));
}

}  // namespace

TEST_CASE("a group may follow a schedule of its own", "[session][learning_rate]") {
  ThreeNumbers model;
  torch::optim::SGD optimizer(groups_of<torch::optim::SGDOptions>(model), torch::optim::SGDOptions(1));
  class Reader : public Hook {
   public:
    explicit Reader(std::map<std::string, double>& rates) : rates_(&rates) {}
    std::string hook_name() const override { return "reader"; }
    Slot slot() const override { return Slot::record; }
    void after_step(StepReport& report) override {
      for (const auto& [name, value] : report.numbers()) (*rates_)[name] = value;
    }

   private:
    std::map<std::string, double>* rates_;
  };
  std::map<std::string, double> rates;
  Session session(*model, optimizer);
  session.use(by_groups()).use(Reader(rates));
  const std::vector<std::vector<double>> wanted{
      {1, 10, 50}, {1, 7.5, 100}, {1, 5, 100}, {1, 2.5, 100}, {1, 0, 100}};
  std::vector<double> before(3);
  for (const auto& of_step : wanted) {
    step(session, model);
    for (size_t g = 0; g < 3; ++g) {
      CAPTURE(g);
      CHECK(rate_of(optimizer, g) == of_step[g]);
      const double now = model->numbers[g].item<double>();
      CHECK(std::exchange(before[g], now) - now == of_step[g]);
    }
    CHECK(rates.at("learning_rate") == of_step[0]);
    CHECK(rates.at("learning_rate/1") == of_step[1]);
    CHECK(rates.at("learning_rate/2") == of_step[2]);
  }
}

TEST_CASE("what settles, ends and is agreed on is that of all groups", "[session][learning_rate]") {
  Progress progress;
  const LearningRate slow = LearningRate(constant_schedule()).group(1, constant_schedule({3}));
  progress.step = 2;
  CHECK_FALSE(slow.settled(progress));
  progress.step = 3;
  CHECK(slow.settled(progress));
  const auto ends = [](int64_t steps) { return warmup_linear({0, steps}); };
  CHECK(LearningRate(ends(5)).group(0, ends(9)).steps_until_zero() == 9);
  CHECK(LearningRate(ends(9)).group(0, ends(5)).steps_until_zero() == 9);
  CHECK_FALSE(LearningRate(ends(5)).group(1, constant_schedule()).steps_until_zero());
  CHECK_FALSE(LearningRate(constant_schedule()).group(1, ends(5)).steps_until_zero());
  CHECK(LearningRate(ends(5)).agreement() != LearningRate(ends(5)).group(1, ends(6)).agreement());
  CHECK(LearningRate(ends(5)).group(1, ends(6)).agreement() !=
        LearningRate(ends(5)).group(2, ends(6)).agreement());
}

TEST_CASE("a schedule of a group that is not there is refused", "[session][learning_rate][mistakes]") {
  ThreeNumbers model;
  FusedAdam optimizer(groups_of<FusedAdamOptions>(model), FusedAdamOptions(1));
  Session session(*model, optimizer);
  CHECK(message_of([&] {
          session.use(LearningRate(constant_schedule()).group(3, constant_schedule()));
        }).find("a schedule for group 3, but the optimizer's 3 parameter groups count from 0") !=
        std::string::npos);
  Session other(*model, optimizer);
  other.use(by_groups());  // the refused one left no claim behind
}

TEST_CASE("a group gets its schedule before the Session begins, not after",
          "[session][learning_rate][mistakes]") {
  ThreeNumbers model;
  FusedAdam optimizer(groups_of<FusedAdamOptions>(model), FusedAdamOptions(1));
  Session session(*model, optimizer);
  const auto rate = std::make_shared<LearningRate>(constant_schedule());
  session.use(rate);
  CHECK(message_of([&] {
          rate->group(1, constant_schedule());
        }).find("LearningRate::group(1) belongs before session.use") == 0);
}

TEST_CASE("a run that goes on has the schedules of all groups in what has begun",
          "[session][learning_rate]") {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  const auto run_until = [&](int64_t until, const LearningRate& hook) {
    ThreeNumbers model;
    FusedAdam optimizer(groups_of<FusedAdamOptions>(model), FusedAdamOptions(1));
    Session session(*model, optimizer);
    session.use(LearningRate(hook)).use(Checkpoints(CheckpointsOptions(folder.path()).every(1)));
    std::string message = message_of([&] { session.resume(); });
    if (!message.empty()) return message;
    while (session.progress().step < until) step(session, model);
    session.finish();
    CHECK(rate_of(optimizer, 1) == 10 * (1 - static_cast<double>(until - 1) / 4));
    return message;
  };
  CHECK(run_until(2, by_groups()).empty());
  CHECK(run_until(3, by_groups()).empty());
  CHECK(run_until(4, LearningRate(constant_schedule()).group(2, constant_schedule({2})))
            .find("would take step 4 at 0.25 times the base rate") != std::string::npos);
  CHECK(run_until(4, by_groups().group(0, warmup_linear({0, 100})))
            .find("would take step 4 at 1 times the base rate") != std::string::npos);
  CHECK(run_until(4, by_groups().group(2, constant_schedule())).empty());  // whose warm-up is over
}

}  // namespace pacer::testing::learning_rate_groups
