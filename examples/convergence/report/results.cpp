// The statistics of the study.
#include "results.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace convergence {
namespace {

// Losses that are closer than this, in nats per byte, count as equal: the same training differs as much from
// one rounding of its sums to another.
constexpr double kLossTolerance = 1e-3;

template <class Value>
double mean_over(const std::vector<const Run*>& runs, Value value) {
  double sum = 0.0;
  for (const Run* run : runs) sum += value(*run);
  return sum / static_cast<double>(runs.size());
}

double median_over(const std::vector<TrainingPoint>& points, double TrainingPoint::*member) {
  std::vector<double> values;
  for (const TrainingPoint& point : points) values.push_back(point.*member);
  return median(values);
}

}  // namespace

Estimate estimate(const std::vector<double>& values) {
  Estimate result;
  result.count = static_cast<int64_t>(values.size());
  if (values.empty()) return result;
  const auto count = static_cast<double>(values.size());
  for (const double value : values) result.mean += value / count;
  if (values.size() < 2) return result;
  double squares = 0.0;
  for (const double value : values) squares += (value - result.mean) * (value - result.mean);
  result.standard_error = std::sqrt(squares / (count - 1.0) / count);
  return result;
}

double median(std::vector<double> values) {
  values.erase(std::remove_if(values.begin(), values.end(), [](double value) { return std::isnan(value); }),
               values.end());
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2.0;
}

std::vector<const Run*> runs_of(const std::vector<Run>& runs, const std::string& arm) {
  std::vector<const Run*> chosen;
  for (const Run& run : runs) {
    if (run.arm == arm) chosen.push_back(&run);
  }
  return chosen;
}

std::vector<ArmSummary> summarize(const std::vector<Run>& runs) {
  std::vector<ArmSummary> summaries;
  for (const Run& run : runs) {
    const auto same = [&](const ArmSummary& summary) { return summary.arm == run.arm; };
    if (std::any_of(summaries.begin(), summaries.end(), same)) continue;
    summaries.emplace_back();
    summaries.back().arm = run.arm;
  }
  for (ArmSummary& summary : summaries) {
    const auto own = runs_of(runs, summary.arm);
    std::vector<double> losses, first_losses, changes, differences, times;
    for (const Run* run : own) {
      losses.push_back(run->validation.back().value);
      first_losses.push_back(run->validation.front().value);
      changes.push_back(losses.back() - first_losses.back());
      for (const Run* first : runs_of(runs, summaries.front().arm)) {
        if (first->seed != run->seed) continue;
        const double goal = first->validation.back().value;
        if (first != run) differences.push_back(losses.back() - goal);
        times.push_back(seconds_to(goal + kLossTolerance, run->validation));
      }
    }
    summary.validation_loss = estimate(losses);
    summary.first_loss = estimate(first_losses);
    summary.change = estimate(changes);
    summary.difference = estimate(differences);
    if (std::all_of(times.begin(), times.end(), [](double time) { return std::isfinite(time); })) {
      summary.time_to_loss = estimate(times);
    }
    summary.tokens = mean_over(own, [](const Run& run) { return double(run.validation.back().tokens); });
    summary.seconds = mean_over(own, [](const Run& run) { return run.seconds(); });
    summary.step_seconds = mean_over(own, [](const Run& run) { return run.step_seconds(); });
    summary.bytes_sent = mean_over(own, [](const Run& run) { return run.bytes_sent(); });
    summary.parameters = mean_over(own, [](const Run& run) { return double(run.parameters); });
    summary.ring_bytes = mean_over(own, [](const Run& run) { return run.ring_bytes(4.0); });
    const bool frozen =
        std::all_of(own.begin(), own.end(), [](const Run* run) { return run->frozen_at > 0; });
    if (frozen) summary.frozen_at = mean_over(own, [](const Run& run) { return double(run.frozen_at); });
    for (const Run* run : own) summary.largest_update = std::max(summary.largest_update, run->largest_update);
    summary.processes = own.front()->processes;
    summary.optimizer_seconds = mean_over(own, [](const Run& run) { return run.optimizer_seconds(); });
    summary.memory_bytes = mean_over(own, [](const Run& run) { return run.memory_bytes(); });
  }
  return summaries;
}

double seconds_to(double value, const Curve& curve) {
  for (size_t i = 0; i < curve.size(); ++i) {
    if (!(curve[i].value <= value)) continue;
    if (i == 0) return curve[i].seconds;
    const CurvePoint &before = curve[i - 1], &after = curve[i];
    const double share = (before.value - value) / (before.value - after.value);
    return before.seconds + share * (after.seconds - before.seconds);
  }
  return std::numeric_limits<double>::infinity();
}

double Run::ring_bytes(double element_bytes) const {
  if (training.empty()) return 0.0;
  const double shares = 2.0 * static_cast<double>(processes - 1) / static_cast<double>(processes);
  return shares * element_bytes * static_cast<double>(parameters) * static_cast<double>(training.back().step);
}

double Run::step_seconds() const {
  std::vector<double> seconds;
  TrainingPoint before;
  for (const TrainingPoint& point : training) {
    seconds.push_back((point.seconds - before.seconds) / static_cast<double>(point.step - before.step));
    before = point;
  }
  return median(seconds);
}

double Run::optimizer_seconds() const { return median_over(training, &TrainingPoint::optimizer_seconds); }

double Run::memory_bytes() const { return median_over(training, &TrainingPoint::memory_bytes); }

Curve curve_of(const Run& run, double TrainingPoint::*member) {
  Curve curve;
  for (const TrainingPoint& point : run.training) {
    if (!std::isnan(point.*member)) curve.push_back({point.tokens, point.seconds, point.*member});
  }
  return curve;
}

Curve mean_curve(const std::vector<Curve>& curves) {
  if (curves.empty()) return {};
  Curve mean = curves.front();
  for (const Curve& curve : curves) mean.resize(std::min(mean.size(), curve.size()));
  const auto count = static_cast<double>(curves.size());
  for (size_t i = 0; i < mean.size(); ++i) {
    mean[i].seconds = mean[i].value = 0.0;
    for (const Curve& curve : curves) {
      mean[i].seconds += curve[i].seconds / count;
      mean[i].value += curve[i].value / count;
    }
  }
  return mean;
}

Curve smooth(const Curve& curve, double decay) {
  Curve smoothed = curve;
  double sum = 0.0, weight = 0.0;
  for (CurvePoint& point : smoothed) {
    sum = decay * sum + (1.0 - decay) * point.value;
    weight = decay * weight + (1.0 - decay);
    point.value = sum / weight;
  }
  return smoothed;
}

}  // namespace convergence
