// The points of the curves. The device is synchronised wherever the clock is read.
#include "training_curve.h"

#include <cmath>
#include <limits>
#include <utility>

#include <ATen/ops/zeros.h>
#include <torch/cuda.h>

#include <pacer/core/error.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>

namespace convergence {
namespace {

constexpr int64_t kTrainingPoints = 200;         // of a run
constexpr int64_t kStepsBetweenGpuSamples = 10;  // the optimizer is timed alone in one step of these

double between(std::chrono::steady_clock::time_point start, std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

}  // namespace

TrainingCurve::TrainingCurve(const Settings& settings, std::shared_ptr<MemoryMeter> memory, Run* run,
                             RunObserver* observer)
    : settings_(settings),
      memory_(std::move(memory)),
      run_(run),
      observer_(observer),
      sequence_length_(static_cast<double>(settings.sequence)),
      kept_layers_(static_cast<double>(settings.layers)) {}

void TrainingCurve::continue_run(const Run& stored, int64_t tokens) {
  // In the order in which they were made: the validation of a moment follows its training point.
  size_t validated = 0;
  const auto take_validations = [&](int64_t before) {
    for (; validated < stored.validation.size() && stored.validation[validated].tokens < before;
         ++validated) {
      run_->validation.push_back(stored.validation[validated]);
      observer_->on_validation(run_->validation.back());
    }
  };
  for (const TrainingPoint& point : stored.training) {
    if (point.tokens > tokens) break;
    take_validations(point.tokens);
    run_->training.push_back(point);
    observer_->on_training(point);
  }
  take_validations(tokens + 1);
}

void TrainingCurve::start_clock() {
  synchronize();
  start_ = Clock::now();
  bytes_at_start_ = parts_->world().bytes_sent();
}

bool TrainingCurve::validation_is_due(int64_t tokens) const {
  if (run_->validation.empty()) return true;
  const int64_t every = settings_.tokens_between_evaluations(), last = run_->validation.back().tokens;
  return tokens / every > last / every || (tokens >= settings_.tokens && last < tokens);
}

void TrainingCurve::add_validation(int64_t tokens, double loss) {
  run_->validation.push_back({tokens, run_->seconds(), loss});
  observer_->on_validation(run_->validation.back());
  seconds_before_ = run_->seconds();
  bytes_before_ = run_->bytes_sent();
  start_clock();
}

void TrainingCurve::attach(pacer::SessionParts& parts) {
  parts.record_loss = true;
  parts_ = &parts;
  loss_sum_ = at::zeros({}, at::TensorOptions(parts.device()).dtype(at::kDouble));
}

void TrainingCurve::begin(const pacer::Progress& /*progress*/, pacer::MicroBatch& /*batch*/) {
  memory_->forget_peak();
}

// Two synchronisations would slow down a GPU: only every tenth step pays for them.
void TrainingCurve::gradients_ready(const pacer::Progress& progress) {
  timed_ = parts_->device().is_cpu() || progress.step % kStepsBetweenGpuSamples == 0;
  if (!timed_) return;
  synchronize();
  optimizer_start_ = Clock::now();
}

void TrainingCurve::after_step(pacer::StepReport& report) {
  memory_bytes_.push_back(static_cast<double>(memory_->peak()));
  if (timed_) {
    synchronize();
    optimizer_seconds_.push_back(between(optimizer_start_, Clock::now()));
  }
  for (const auto& [name, value] : report.numbers()) {
    if (name == "learning_rate") learning_rate_ = value;
    if (name == "sequence_length") sequence_length_ = value;
    if (name == "kept_layers") kept_layers_ = value;
    if (name == "theta") theta_ = value;
    if (name == "micro_steps") micro_steps_ = value;
  }
  loss_sum_.add_(report.loss_sum(), report.loss_average());
  kept_layers_sum_ += kept_layers_;
  ++steps_in_sum_;
  const int64_t tokens = report.progress().tokens;
  if (point_is_due(tokens) || validation_is_due(tokens)) add_point(report.progress());
}

bool TrainingCurve::point_is_due(int64_t tokens) const {
  const int64_t every = (settings_.tokens + kTrainingPoints - 1) / kTrainingPoints;
  return tokens / every > (run_->training.empty() ? 0 : run_->training.back().tokens / every);
}

void TrainingCurve::add_point(const pacer::Progress& progress) {
  TrainingPoint point;
  point.step = progress.step;
  point.tokens = progress.tokens;
  const auto steps = static_cast<double>(steps_in_sum_);
  point.loss = loss_sum_.item<double>() / steps;
  point.seconds = seconds();
  point.bytes_sent = bytes_sent();
  pacer::require<pacer::Error>(std::isfinite(point.loss), "the training loss of ", run_->arm, " (seed ",
                               run_->seed, ") is not finite after step ", point.step,
                               "; lower the learning rate");
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  point.learning_rate = learning_rate_;
  point.gradient_norm = parts_->has_guard() ? parts_->guard()->read().norm : kUnknown;
  point.sequence_length = sequence_length_;
  point.theta = theta_;
  point.micro_steps = micro_steps_;
  point.kept_layers = kept_layers_sum_ / steps;
  point.optimizer_seconds = optimizer_seconds_.empty() ? kUnknown : median(optimizer_seconds_);
  point.memory_bytes = memory_bytes_.empty() ? kUnknown : median(memory_bytes_);
  run_->training.push_back(point);
  observer_->on_training(point);
  loss_sum_.zero_();
  kept_layers_sum_ = 0.0;
  steps_in_sum_ = 0;
  optimizer_seconds_.clear();
  memory_bytes_.clear();
}

void TrainingCurve::save(pacer::NamedTensors& state) const {
  state["loss_sum"] = pacer::number_tensor(loss_sum_.item<double>());
  state["kept_layers_sum"] = pacer::number_tensor(kept_layers_sum_);
  state["steps_in_sum"] = pacer::number_tensor(steps_in_sum_);
  state["seconds"] = pacer::number_tensor(seconds());
  state["bytes_sent"] = pacer::number_tensor(bytes_sent());
}

void TrainingCurve::load(const pacer::NamedTensors& state) {
  loss_sum_.fill_(pacer::require_number<double>(state, "loss_sum"));
  kept_layers_sum_ = pacer::require_number<double>(state, "kept_layers_sum");
  steps_in_sum_ = pacer::require_number<int64_t>(state, "steps_in_sum");
  seconds_before_ = pacer::require_number<double>(state, "seconds");
  bytes_before_ = pacer::require_number<double>(state, "bytes_sent");
}

double TrainingCurve::seconds() const {
  synchronize();
  return seconds_before_ + between(start_, Clock::now());
}

double TrainingCurve::bytes_sent() const {
  return bytes_before_ + static_cast<double>(parts_->world().bytes_sent() - bytes_at_start_);
}

void TrainingCurve::synchronize() const {
  const at::Device device = parts_->device();
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

}  // namespace convergence
