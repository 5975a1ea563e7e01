// The Metrics hook on a GPU: the numbers that the device has, read without a wait in any step.
#include "support/catch.h"

#include <sstream>

#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <nlohmann/json.hpp>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/hooks/step_report.h>
#include <pacer/metrics/metrics.h>
#include <pacer/session/session.h>

#include "support/both_devices.h"
#include "support/session/small_model.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

std::vector<nlohmann::json> gpu_metrics(const TemporaryFolder& folder) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(content_of(folder.path("metrics.jsonl")));
  for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

// Reads what the device has after each step, and waits for it. Has its turn before the Metrics hook.
class WaitingReader : public Hook {
 public:
  struct Values {
    double loss;
    kernels::GradientCheck check;
  };
  WaitingReader(std::vector<Values>& values, GradientGuard*& guard) : values_(&values), guard_(&guard) {}
  std::string hook_name() const override { return "a reader"; }
  Slot slot() const override { return Slot::record; }
  void attach(SessionParts& parts) override { *guard_ = parts.guard().get(); }
  void after_step(StepReport& report) override {
    values_->push_back({report.loss_sum().item<double>() * report.loss_average(), (*guard_)->read()});
  }

 private:
  std::vector<Values>* values_;
  GradientGuard** guard_;
};

// Any operation of LibTorch that waits for the GPU throws while this lives.
class NoWaitingForMetrics {
 public:
  NoWaitingForMetrics() : before_(c10::cuda::warning_state().get_sync_debug_mode()) {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  }
  ~NoWaitingForMetrics() { c10::cuda::warning_state().set_sync_debug_mode(before_); }
  NoWaitingForMetrics(const NoWaitingForMetrics&) = delete;
  NoWaitingForMetrics& operator=(const NoWaitingForMetrics&) = delete;

 private:
  c10::cuda::SyncDebugMode before_;
};

// Puts pinned memory for many steps into LibTorch's cache, as a run has it after a while: memory that is new
// may have to wait for the GPU.
void fill_pinned_cache() {
  std::vector<Tensor> blocks;
  for (const int64_t bytes : {4, 64, 128, 256, 512}) {
    for (int i = 0; i < 100; ++i) {
      blocks.push_back(torch::empty({bytes}, torch::TensorOptions(torch::kByte).pinned_memory(true)));
    }
  }
}

struct GpuMetricsRun {
  TemporaryFolder folder;
  SmallModel model = small_model();
  std::unique_ptr<FusedAdamW> optimizer;
  std::unique_ptr<Session> session;

  GpuMetricsRun() {
    model->to(at::kCUDA);
    optimizer = std::make_unique<FusedAdamW>(model->parameters(), FusedAdamWOptions(0.01));
    session = std::make_unique<Session>(*model, *optimizer);
    session->use(GradientAccumulation(2)).use(GradientClipping(0.5));
  }
  void use_metrics() { session->use(Metrics(MetricsOptions(folder.path()).progress(false))); }
  // Loss x factor is what is trained on.
  void step(int64_t i, double factor = 1) {
    for (int64_t m = 0; m < 2; ++m) {
      const auto batch = small_batch(2 * i + m);
      auto [x, y] = session->begin(batch.first, batch.second);
      const Tensor loss = model->loss(x, y) * factor;
      session->record("own_loss", loss);
      session->backward(loss);
      session->step();
    }
  }
};

TEST_CASE("records on a GPU hold the values of the device, bit by bit", "[session][metrics][gpu]") {
  PACER_NEEDS_GPU();
  std::vector<WaitingReader::Values> expected;
  GradientGuard* guard = nullptr;
  GpuMetricsRun run;
  run.use_metrics();
  run.session->use(WaitingReader(expected, guard));
  for (int64_t i = 0; i < 6; ++i) run.step(i, i == 3 ? NAN : 1);
  run.session->finish();
  const auto lines = gpu_metrics(run.folder);
  REQUIRE(lines.size() == 6);
  for (size_t i = 0; i < 6; ++i) {
    CAPTURE(i);
    CHECK(lines[i]["step"] == i + 1);
    CHECK(lines[i]["tokens"] == (i + 1) * 4 * kFullLength);
    CHECK(lines[i]["skipped_steps"] == expected[i].check.skipped_steps);
    CHECK(lines[i]["skipped_steps"] == (i < 3 ? 0 : 1));
    if (i == 3) {
      CHECK(lines[i]["loss"] == "nan");
      CHECK(lines[i]["own_loss"] == "nan");
      CHECK(lines[i]["gradient_norm"] == "nan");
    } else {
      CHECK(lines[i]["loss"].get<double>() == expected[i].loss);
      // Two fp32 losses, whose mean was taken in fp32 by the Session and in fp64 here.
      CHECK(lines[i]["own_loss"].get<double>() == Catch::Approx(expected[i].loss).epsilon(2e-7));
      CHECK(lines[i]["gradient_norm"].get<double>() == expected[i].check.norm);
    }
  }
}

TEST_CASE("no step waits for the values that it records", "[session][metrics][gpu]") {
  PACER_NEEDS_GPU();
  GpuMetricsRun run;
  run.use_metrics();
  for (int64_t i = 0; i < 3; ++i) run.step(i);
  torch::cuda::synchronize();
  {
    const NoWaitingForMetrics no_waiting;
    for (int64_t i = 3; i < 20; ++i) REQUIRE_NOTHROW(run.step(i));
  }
  run.session->finish();
  const auto lines = gpu_metrics(run.folder);
  REQUIRE(lines.size() == 20);
  for (size_t i = 0; i < lines.size(); ++i) CHECK(lines[i]["step"] == i + 1);
}

TEST_CASE("while the GPU is behind, records wait; later steps do not change them",
          "[session][metrics][gpu]") {
  PACER_NEEDS_GPU();
  GpuMetricsRun stalled, calm;
  fill_pinned_cache();
  for (auto* run : {&stalled, &calm}) {
    run->use_metrics();
    for (int64_t i = 0; i < 3; ++i) run->step(i);
    torch::cuda::synchronize();
    if (run == &stalled) at::cuda::sleep(int64_t{4} << 30);  // clock cycles: two seconds or more
    for (int64_t i = 3; i < 8; ++i) run->step(i);
    if (run == &stalled) CHECK(gpu_metrics(run->folder).size() <= 3);
    run->session->finish();
  }
  const auto late = gpu_metrics(stalled.folder), early = gpu_metrics(calm.folder);
  REQUIRE(late.size() == 8);
  REQUIRE(early.size() == 8);
  for (size_t i = 0; i < 8; ++i) {
    CAPTURE(i);
    CHECK(late[i]["step"] == i + 1);
    // The two runs may add up gradients in another order; steps differ by far more than that.
    for (const char* key : {"loss", "gradient_norm"}) {
      const double expected = early[i][key].get<double>();
      CHECK(late[i][key].get<double>() == Catch::Approx(expected).epsilon(1e-4));
      if (i > 0) CHECK(expected != Catch::Approx(early[i - 1][key].get<double>()).epsilon(2e-4));
    }
  }
}

}  // namespace
}  // namespace pacer::testing
