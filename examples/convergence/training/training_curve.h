// The hook that watches a run: it adds up the loss on the device, counts kept layers, takes the time, and
// reads all of it now and then, so that a step never waits for a GPU. A hook of one's own looks like this.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/hooks/hook.h>

#include "convergence/report/results.h"
#include "convergence/settings.h"
#include "memory_meter.h"

namespace convergence {

// Hears of progress while a run goes on. Points arrive in order, the last when the run has ended.
class RunObserver {
 public:
  virtual ~RunObserver() = default;
  virtual void on_training(const TrainingPoint& /*point*/) {}
  virtual void on_validation(const CurvePoint& /*point*/) {}
};

class TrainingCurve : public pacer::Hook {
 public:
  // Adds its points to `run`, which must outlive it as `settings` and `observer` must. `memory` is counting.
  TrainingCurve(const Settings& settings, std::shared_ptr<MemoryMeter> memory, Run* run,
                RunObserver* observer);

  // ---- the loop's part ----

  // Takes over the points of an interrupted run up to `tokens`, where it continues.
  void continue_run(const Run& stored, int64_t tokens);
  // The clock runs from here on, and bytes are counted, apart from validations.
  void start_clock();
  // At the beginning, every settings.tokens_between_evaluations(), and at the end.
  bool validation_is_due(int64_t tokens) const;
  // A validation that ended just now.
  void add_validation(int64_t tokens, double loss);

  // ---- the Session's part ----
  std::string hook_name() const override { return "training_curve"; }
  // Behind the learning rate, which tells its value, and before checkpoints, which save this hook's.
  pacer::Slot slot() const override { return pacer::Slot::schedule; }
  void attach(pacer::SessionParts& parts) override;
  void begin(const pacer::Progress& progress, pacer::MicroBatch& batch) override;
  void gradients_ready(const pacer::Progress& progress) override;
  // Throws pacer::Error where the loss is no longer finite.
  void after_step(pacer::StepReport& report) override;
  // What a point is made of, as far as it has come.
  void save(pacer::NamedTensors& state) const override;
  void load(const pacer::NamedTensors& state) override;

 private:
  using Clock = std::chrono::steady_clock;

  bool point_is_due(int64_t tokens) const;
  void add_point(const pacer::Progress& progress);
  void synchronize() const;
  double seconds() const;
  double bytes_sent() const;

  const Settings& settings_;
  std::shared_ptr<MemoryMeter> memory_;
  Run* run_;
  RunObserver* observer_;
  pacer::SessionParts* parts_ = nullptr;

  Clock::time_point start_;
  double seconds_before_ = 0.0;  // until start_
  int64_t bytes_at_start_ = 0;   // sent at start_, in what training and in what else
  double bytes_before_ = 0.0;    // sent in training until start_
  bool timed_ = false;           // this step's optimizer
  Clock::time_point optimizer_start_;
  // Since the last point:
  at::Tensor loss_sum_;  // fp64, on the device
  int64_t steps_in_sum_ = 0;
  double kept_layers_sum_ = 0.0;
  std::vector<double> optimizer_seconds_, memory_bytes_;
  // Of the last step:
  double learning_rate_ = 0.0;
  double theta_ = 1.0;
  double micro_steps_ = 1.0;
  double sequence_length_;
  double kept_layers_;
};

}  // namespace convergence
