// Adam and AdamW restated in double precision, one element at a time, from the papers (arXiv:1412.6980
// algorithm 1, 1711.05101 algorithm 2, 1904.09237) and from nothing in pacer, so that the two can only agree
// by being right.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pacer::testing {

struct AdamRule {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled = false;  // AdamW
  bool amsgrad = false;
  bool bias_correction = true;
};

class ReferenceAdam {
 public:
  ReferenceAdam(const AdamRule& rule, std::vector<double> values)
      : parameter(std::move(values)),
        exp_avg(parameter.size(), 0.0),
        exp_avg_sq(parameter.size(), 0.0),
        max_exp_avg_sq(parameter.size(), 0.0),
        rule_(rule) {}

  void step(const std::vector<double>& gradient) {
    ++steps;
    const double t = static_cast<double>(steps);
    const double correction1 = rule_.bias_correction ? 1 - std::pow(rule_.beta1, t) : 1;
    const double correction2 = rule_.bias_correction ? 1 - std::pow(rule_.beta2, t) : 1;
    for (size_t i = 0; i < parameter.size(); ++i) {
      double g = gradient[i];
      if (rule_.decoupled) {
        parameter[i] *= 1 - rule_.lr * rule_.weight_decay;
      } else {
        g += rule_.weight_decay * parameter[i];
      }
      exp_avg[i] = rule_.beta1 * exp_avg[i] + (1 - rule_.beta1) * g;
      exp_avg_sq[i] = rule_.beta2 * exp_avg_sq[i] + (1 - rule_.beta2) * g * g;
      max_exp_avg_sq[i] = std::max(max_exp_avg_sq[i], exp_avg_sq[i]);
      const double second = (rule_.amsgrad ? max_exp_avg_sq[i] : exp_avg_sq[i]) / correction2;
      parameter[i] -= rule_.lr * (exp_avg[i] / correction1) / (std::sqrt(second) + rule_.eps);
    }
  }

  int64_t steps = 0;
  std::vector<double> parameter;
  std::vector<double> exp_avg;
  std::vector<double> exp_avg_sq;
  std::vector<double> max_exp_avg_sq;

 private:
  AdamRule rule_;
};

}  // namespace pacer::testing
