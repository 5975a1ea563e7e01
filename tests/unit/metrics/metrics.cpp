// The records of the Metrics hook against numbers computed beside the run. Values that arrive late are played
// by hand; tests/device/session_metrics_gpu.cpp has real ones.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/metrics/detail/metrics_queue.h>
#include <pacer/schedulers/learning_rate.h>

#include "support/metrics/metrics_run.h"

namespace pacer::testing {
namespace {

using Catch::Approx;

// Arrives when it is told to.
class SlowTensor final : public detail::HostCopy {
 public:
  struct Switch {
    bool arrived = false;
    int64_t waits = 0;
  };
  SlowTensor(const Tensor& tensor, Switch& state) : HostCopy(tensor.clone()), state_(&state) {}
  bool arrived() const override { return state_->arrived; }
  void wait() const override { ++state_->waits; }

 private:
  Switch* state_;
};

StepReport metrics_report(int64_t step, double loss) {
  StepReport report(metrics_progress(step, 10 * step));
  report.set_loss(torch::tensor(loss, torch::kFloat), 1);
  return report;
}

}  // namespace

TEST_CASE("records hold the numbers that were computed beside the run", "[session][metrics]") {
  for (const bool by_tokens : {false, true}) {
    CAPTURE(by_tokens);
    const TemporaryFolder folder;
    auto model = small_model(), twin = small_model();
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01));
    Session session(*model, optimizer);
    session.use(GradientAccumulation(GradientAccumulationOptions(2).weight_by_tokens(by_tokens)))
        .use(GradientClipping(0.1))  // the norm is that before clipping
        .use(LearningRate(warmup_cosine({4, 100})))
        .use(Metrics(quiet_metrics(folder)));

    std::vector<double> losses, norms;
    std::vector<int64_t> tokens = {0};
    const std::vector<std::vector<int64_t>> windows = {{1, 5}, {4, 2}, {3}};  // sizes of the micro-batches
    for (const auto& window : windows) {
      for (size_t p = 0; p < twin->parameters().size(); ++p) {
        const torch::NoGradGuard no_grad;
        twin->parameters()[p].copy_(model->parameters()[p]);
        twin->parameters()[p].mutable_grad() = Tensor();
      }
      Tensor sum = torch::zeros({}, torch::kDouble);
      double weights = 0;
      for (const int64_t size : window) {
        const auto batch = small_batch(17 * size, size);
        sum = sum + (by_tokens ? size : 1) * twin->loss(batch.first, batch.second).to(torch::kDouble);
        weights += static_cast<double>(by_tokens ? size : 1);
        auto [x, y] = session.begin(batch.first, batch.second);
        session.backward(model->loss(x, y));
        session.step();
      }
      (sum / weights).backward();
      losses.push_back(sum.item<double>() / weights);
      double squares = 0;
      for (const Tensor& parameter : twin->parameters()) {
        squares += parameter.grad().to(torch::kDouble).square().sum().item<double>();
      }
      norms.push_back(std::sqrt(squares));
      int64_t count = 0;
      for (const int64_t size : window) count += size * kFullLength;
      tokens.push_back(tokens.back() + count);
    }
    CHECK(metrics_steps(folder) == metrics_range(1, 2));  // on the CPU nothing is late
    session.finish();

    const auto lines = metrics_lines(folder);
    REQUIRE(lines.size() == 3);
    for (size_t i = 0; i < 3; ++i) {
      CAPTURE(i);
      std::vector<std::string> keys;
      for (const auto& item : lines[i].items()) keys.push_back(item.key());
      CHECK(keys == std::vector<std::string>{"step", "tokens", "loss", "learning_rate", "gradient_norm",
                                             "skipped_steps", "seconds_per_step", "tokens_per_second"});
      CHECK(lines[i]["step"] == i + 1);
      CHECK(lines[i]["tokens"] == tokens[i + 1]);
      CHECK(lines[i]["loss"].get<double>() == Approx(losses[i]).epsilon(1e-6));
      CHECK(lines[i]["gradient_norm"].get<double>() == Approx(norms[i]).epsilon(1e-5));
      CHECK(norms[i] > 0.1);
      CHECK(lines[i]["learning_rate"] == 0.01 * (static_cast<double>(i + 1) / 4));
      CHECK(lines[i]["skipped_steps"] == 0);
      const double seconds = lines[i]["seconds_per_step"].get<double>();
      CHECK(seconds > 0);
      CHECK(lines[i]["tokens_per_second"].get<double>() * seconds ==
            Approx(static_cast<double>(tokens[i + 1] - tokens[i])));
    }
    check_csv_equals_jsonl(folder);
  }
}

TEST_CASE("every n-th step is recorded, with the mean loss and the time of n steps", "[session][metrics]") {
  const TemporaryFolder every_step, every_third;
  metrics_run(quiet_metrics(every_step), 0, 7);
  metrics_run(quiet_metrics(every_third).every(3), 0, 7);
  CHECK(metrics_steps(every_step) == metrics_range(1, 7));
  CHECK(metrics_steps(every_third) == std::vector<int64_t>{3, 6});
  const auto all = metrics_lines(every_step);
  for (const MetricsJson& line : metrics_lines(every_third)) {
    const size_t step = line["step"].get<size_t>();
    double sum = 0;
    for (size_t i = step - 3; i < step; ++i) sum += all[i]["loss"].get<double>();
    CHECK(line["loss"].get<double>() == Approx(sum / 3).epsilon(1e-12));
    CHECK(line["loss"] != all[step - 1]["loss"]);
    CHECK(line["tokens"] == all[step - 1]["tokens"]);
    CHECK(line["tokens_per_second"].get<double>() * line["seconds_per_step"].get<double>() == Approx(32));
    CHECK_FALSE(line.contains("gradient_norm"));  // nobody looks at the gradients
  }
  check_csv_equals_jsonl(every_third);
}

TEST_CASE("a step that asks for a record gets one, and the next mean begins behind it",
          "[session][metrics]") {
  const TemporaryFolder every_step, folder;
  metrics_run(quiet_metrics(every_step), 0, 6);
  MetricsRun run;
  run.session.use(Metrics(quiet_metrics(folder).every(3)))
      .use(std::make_shared<MetricsSeam>([](StepReport& report) {
        if (report.progress().step == 5) report.request_record();
      }));
  run.steps(6);
  run.session.finish();
  CHECK(metrics_steps(folder) == std::vector<int64_t>{3, 5, 6});
  const auto all = metrics_lines(every_step), few = metrics_lines(folder);
  const auto loss = [](const MetricsJson& line) { return line["loss"].get<double>(); };
  CHECK(loss(few[1]) == Approx((loss(all[3]) + loss(all[4])) / 2).epsilon(1e-12));
  CHECK(few[2]["loss"] == all[5]["loss"]);
}

TEST_CASE("a diverged step is recorded as it is", "[session][metrics]") {
  const TemporaryFolder folder;
  MetricsRun run;
  run.session.use(GradientClipping(1.0)).use(Metrics(quiet_metrics(folder)));
  run.step(0);
  run.step(1, NAN);
  run.step(2, INFINITY);
  run.step(3);
  run.session.finish();
  const auto lines = metrics_lines(folder);
  REQUIRE(lines.size() == 4);
  CHECK(lines[1]["loss"] == "nan");
  CHECK(lines[1]["gradient_norm"] == "nan");
  CHECK(lines[2]["loss"] == "inf");
  CHECK(std::isfinite(lines[3]["loss"].get<double>()));
  for (size_t i = 0; i < 4; ++i) CHECK(lines[i]["skipped_steps"] == std::min<size_t>(i, 2));
  CHECK(metrics_rows(folder)[2][2] == "nan");
  CHECK(metrics_rows(folder)[3][2] == "inf");
  check_csv_equals_jsonl(folder);
}

TEST_CASE("records wait for their values in order, and the host for them only when too many do",
          "[session][metrics]") {
  constexpr size_t kMany = detail::MetricsQueue::kLongest;
  std::deque<SlowTensor::Switch> switches;
  detail::MetricsQueue queue(
      [&](const Tensor& tensor) { return std::make_unique<SlowTensor>(tensor, switches.emplace_back()); });
  for (size_t i = 0; i < kMany; ++i) queue.push(metrics_report(static_cast<int64_t>(i), 0.5), std::nullopt);
  switches[1].arrived = switches[2].arrived = true;
  CHECK_FALSE(queue.pop(false));
  switches[0].arrived = true;
  for (int64_t i = 0; i < 3; ++i) CHECK(queue.pop(false)->step == i);
  CHECK_FALSE(queue.pop(false));
  for (size_t i = kMany; i < kMany + 4; ++i)
    queue.push(metrics_report(static_cast<int64_t>(i), 0.5), std::nullopt);
  CHECK(queue.size() == kMany + 1);
  CHECK(queue.pop(false)->step == 3);  // one too many
  CHECK_FALSE(queue.pop(false));
  CHECK(queue.size() == kMany);
  for (const auto& each : switches) CHECK(each.waits == (&each == &switches[3] ? 1 : 0));
  for (int64_t i = 4; i < static_cast<int64_t>(kMany) + 4; ++i) CHECK(queue.pop(true)->step == i);
  CHECK_FALSE(queue.pop(true));
}

TEST_CASE("a record keeps the values of its step, whatever the next one writes", "[session][metrics]") {
  detail::MetricsQueue queue;
  kernels::GradientCheck check;
  const Tensor memory = torch::zeros({static_cast<int64_t>(sizeof check)}, torch::kByte);
  const Tensor loss = torch::tensor(6.0, torch::kFloat);
  const auto push = [&](int64_t step) {
    std::memcpy(memory.mutable_data_ptr(), &check, sizeof check);
    StepReport report(metrics_progress(step));
    report.set_loss(loss, 0.25);
    report.set_check(memory);
    queue.push(report, std::nullopt);
  };
  check.norm = 3;
  check.loss_scale = 1024;
  check.skipped_steps = 2;
  push(1);
  loss.fill_(8);
  check.norm = 4;
  check.loss_scale = 1;
  push(2);
  loss.fill_(100);
  memory.zero_();
  const auto first = *queue.pop(false), second = *queue.pop(false);
  CHECK(first.find("loss") == 1.5);
  CHECK(first.find("gradient_norm") == 3.0);
  CHECK(first.find("loss_scale") == 1024.0);
  CHECK(first.find("skipped_steps") == 2.0);
  CHECK(second.find("loss") == 2.0);
  CHECK(second.find("gradient_norm") == 4.0);
  CHECK_FALSE(second.find("loss_scale").has_value());
}

TEST_CASE("metrics refuse what cannot be, in words", "[session][metrics]") {
  CHECK(contains(refusal([] { Metrics(""); }), "folder"));
  for (const int64_t bad : {int64_t{0}, int64_t{-3}}) {
    CHECK(contains(refusal([&] { Metrics(MetricsOptions("run").every(bad)); }), "every"));
    CHECK(contains(refusal([&] { Metrics(MetricsOptions("run").total_steps(bad)); }), "total_steps"));
    CHECK(contains(refusal([&] { Metrics(MetricsOptions("run").total_tokens(bad)); }), "total_tokens"));
  }
  const TemporaryFolder folder;
  MetricsRun twice;
  twice.session.use(Metrics(quiet_metrics(folder)));
  CHECK(contains(refusal([&] { twice.session.use(Metrics(quiet_metrics(folder))); }), "metrics"));
  for (const char* name : {"loss", "gradient_norm", "mine", ""}) {
    CAPTURE(name);
    MetricsRun run;
    run.session.use(Metrics(quiet_metrics(folder)))
        .use(std::make_shared<MetricsSeam>([&](StepReport& report) {
          report.add("mine", 1);
          report.add(name, 2);
        }));
    CHECK(contains(refusal([&] { run.step(0); }), std::string(name).empty() ? "without a name" : name));
    CHECK(metrics_lines(folder).empty());
  }
}

}  // namespace pacer::testing
