// LAMB restated in double precision from the paper (arXiv:1904.00962, algorithm 2) and from nothing in pacer,
// one tensor at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pacer::testing {

struct LambRule {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-6;
  double weight_decay = 0.01;
  double min_coeff = 0.01;
  double max_coeff = 10;
  bool bias_correction = true;
  bool adapt = true;
};

inline double euclidean_norm(const std::vector<double>& values) {
  long double sum = 0;
  for (const double value : values) sum += static_cast<long double>(value) * value;
  return static_cast<double>(std::sqrt(sum));
}

class ReferenceLamb {
 public:
  ReferenceLamb(const LambRule& rule, std::vector<double> values)
      : parameter(std::move(values)),
        exp_avg(parameter.size(), 0.0),
        exp_avg_sq(parameter.size(), 0.0),
        rule(rule) {}

  void step(const std::vector<double>& gradient) {
    ++steps;
    const size_t size = parameter.size();
    std::vector<double> update(size);
    const double t = static_cast<double>(steps);
    for (size_t i = 0; i < size; ++i) {
      exp_avg[i] = rule.beta1 * exp_avg[i] + (1 - rule.beta1) * gradient[i];
      exp_avg_sq[i] = rule.beta2 * exp_avg_sq[i] + (1 - rule.beta2) * gradient[i] * gradient[i];
      double first = exp_avg[i], second = exp_avg_sq[i];
      if (rule.bias_correction) {
        first /= 1 - std::pow(rule.beta1, t);
        second /= 1 - std::pow(rule.beta2, t);
      }
      update[i] = first / (std::sqrt(second) + rule.eps) + rule.weight_decay * parameter[i];
    }
    const double of_parameter = euclidean_norm(parameter), of_update = euclidean_norm(update);
    ratio = 1;
    if (rule.adapt && of_parameter > 0 && of_update > 0) {
      ratio = std::min(std::max(of_parameter / of_update, rule.min_coeff), rule.max_coeff);
    }
    for (size_t i = 0; i < size; ++i) parameter[i] -= rule.lr * ratio * update[i];
  }

  int64_t steps = 0;
  double ratio = 1;
  std::vector<double> parameter;
  std::vector<double> exp_avg;
  std::vector<double> exp_avg_sq;
  LambRule rule;
};

}  // namespace pacer::testing
