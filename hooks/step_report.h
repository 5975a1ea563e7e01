// What a step leaves to those who record it: progress and named values. Values may still be on the GPU; who
// reads them decides when to wait.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/hooks/progress.h>

namespace pacer {

class StepReport {
 public:
  explicit StepReport(const Progress& progress) : progress_(progress) {}

  // After the step: progress().step counts it.
  const Progress& progress() const { return progress_; }

  // Adds a number to what is reported of this step.
  void add(std::string name, double value) { numbers_.emplace_back(std::move(name), value); }
  const std::vector<std::pair<std::string, double>>& numbers() const { return numbers_; }
  // The same for a number that is on a device: fp64, no dimensions.
  void add(std::string name, at::Tensor number) {
    late_numbers_.emplace_back(std::move(name), std::move(number));
  }
  const std::vector<std::pair<std::string, at::Tensor>>& late_numbers() const { return late_numbers_; }

  // Asks Metrics for a record of this step, whatever MetricsOptions::every says.
  void request_record() { record_is_requested_ = true; }
  bool record_is_requested() const { return record_is_requested_; }

  // fp32 or fp64, no dimensions, on the device: the weighted sum of the window's losses; times loss_average()
  // their mean.
  void set_loss(at::Tensor sum, double average) {
    loss_sum_ = std::move(sum);
    loss_average_ = average;
  }
  const at::Tensor& loss_sum() const { return loss_sum_; }
  double loss_average() const { return loss_average_; }

  // The guard's memory (one kernels::GradientCheck, on the device); undefined without a guard. The next step
  // overwrites it.
  void set_check(at::Tensor check) { check_ = std::move(check); }
  const at::Tensor& check() const { return check_; }

 private:
  Progress progress_;
  std::vector<std::pair<std::string, double>> numbers_;
  std::vector<std::pair<std::string, at::Tensor>> late_numbers_;
  at::Tensor loss_sum_;
  double loss_average_ = 1;
  at::Tensor check_;
  bool record_is_requested_ = false;
};

}  // namespace pacer
