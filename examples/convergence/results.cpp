// The statistics of the study.
#include "results.h"

#include <algorithm>
#include <cmath>

namespace convergence {
namespace {

template <class Value>
double mean_over(const std::vector<const Run*>& runs, Value value) {
  double sum = 0.0;
  for (const Run* run : runs) sum += value(*run);
  return sum / static_cast<double>(runs.size());
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
    std::vector<double> losses, differences;
    for (const Run* run : own) {
      losses.push_back(run->validation.back().loss);
      for (const Run* first : runs_of(runs, summaries.front().arm)) {
        if (first->seed == run->seed && first != run) {
          differences.push_back(losses.back() - first->validation.back().loss);
        }
      }
    }
    summary.validation_loss = estimate(losses);
    summary.difference = estimate(differences);
    summary.tokens = mean_over(own, [](const Run& run) { return double(run.validation.back().tokens); });
    summary.seconds = mean_over(own, [](const Run& run) { return run.seconds; });
    summary.step_seconds = mean_over(own, [](const Run& run) { return run.step_seconds; });
    summary.optimizer_seconds = mean_over(own, [](const Run& run) { return run.optimizer_seconds; });
  }
  return summaries;
}

std::vector<CurvePoint> mean_curve(const std::vector<const Run*>& runs, std::vector<CurvePoint> Run::*curve) {
  if (runs.empty()) return {};
  size_t length = (runs.front()->*curve).size();
  for (const Run* run : runs) length = std::min(length, (run->*curve).size());
  std::vector<CurvePoint> mean;
  for (size_t i = 0; i < length; ++i) {
    mean.push_back({(runs.front()->*curve)[i].tokens,
                    mean_over(runs, [&](const Run& run) { return (run.*curve)[i].seconds; }),
                    mean_over(runs, [&](const Run& run) { return (run.*curve)[i].loss; })});
  }
  return mean;
}

std::vector<CurvePoint> smooth(const std::vector<CurvePoint>& curve, double decay) {
  std::vector<CurvePoint> smoothed = curve;
  double sum = 0.0, weight = 0.0;
  for (CurvePoint& point : smoothed) {
    sum = decay * sum + (1.0 - decay) * point.loss;
    weight = decay * weight + (1.0 - decay);
    point.loss = sum / weight;
  }
  return smoothed;
}

}  // namespace convergence
