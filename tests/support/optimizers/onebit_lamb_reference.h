// 1-bit LAMB as a textbook has it (Li et al., arXiv:2104.06069, algorithm 1; LAMB: arXiv:1904.00962). Written
// from the definition and from nothing in pacer; what it shares with 1-bit Adam is in
// onebit_method_reference.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/optimizers/onebit_method_reference.h"

namespace pacer::testing {

struct OneBitLambParameter : OneBitMethodParameter {
  // Of its group.
  double min_coeff = 0.01, max_coeff = 10, coeff_beta = 0.9;
  double factor_min = 0.5, factor_max = 1, factor_threshold = 0.1;
  bool adapt = true;
  // Its state.
  std::vector<float> fresh_variance;
  double average = 0;    // of the trust ratios of warm-up, not yet corrected for its start at zero
  int64_t averaged = 0;  // how many they were
  double factor = 1;     // f, the last one

  double coefficient() const { return averaged == 0 ? 1 : average / one_minus_power(coeff_beta, averaged); }
};

class OneBitLambTextbook : public OneBitMethodTextbook<OneBitMethodRules, OneBitLambParameter> {
 public:
  using OneBitMethodTextbook::OneBitMethodTextbook;

 private:
  // What of a step is the same for all elements of a parameter, each rounded from double once.
  struct Constants {
    explicit Constants(const Parameter& p)
        : beta1(static_cast<float>(p.beta1)),
          rest1(static_cast<float>(1.0 - p.beta1)),
          beta2(static_cast<float>(p.beta2)),
          rest2(static_cast<float>(1.0 - p.beta2)),
          eps(static_cast<float>(p.eps)),
          decay(static_cast<float>(p.weight_decay)),
          unbias1(static_cast<float>(1.0 / p.correction(p.beta1, p.steps))),
          unbias2(static_cast<float>(1.0 / std::sqrt(p.correction(p.beta2, p.steps)))) {}
    float beta1, rest1, beta2, rest2, eps, decay, unbias1, unbias2;
  };

  static double clamped(double value, double low, double high) {
    return value < low ? low : value > high ? high : value;
  }
  static void move(Parameter& p, double size, const Numbers& update) {
    const auto rounded = static_cast<float>(size);
    for (size_t k = 0; k < update.size(); ++k) p.value[k] = std::fmaf(-rounded, update[k], p.value[k]);
  }

  // LAMB, and the average of its trust ratios.
  void full_step(size_t i, const Gradients& gradients, double clip) override {
    Parameter& p = parameters[i];
    const auto gradient = mean_of(gradients, i, clip);
    if (!gradient) return;
    ++p.steps;
    const Constants c(p);
    Numbers update(p.value.size());
    for (size_t k = 0; k < update.size(); ++k) {
      const float g = (*gradient)[k];
      p.momentum[k] = std::fmaf(c.beta1, p.momentum[k], c.rest1 * g);
      p.variance[k] = std::fmaf(c.beta2, p.variance[k], (c.rest2 * g) * g);
      const float denominator = std::fmaf(std::sqrt(p.variance[k]), c.unbias2, c.eps);
      update[k] = std::fmaf(c.decay, p.value[k], c.unbias1 * (p.momentum[k] / denominator));
    }
    const double of_value = squares(p.value), of_update = squares(update);
    double ratio = 1;
    if (p.adapt && of_value != 0 && of_update != 0) {
      const double raw = std::sqrt(of_value) / std::sqrt(of_update);
      ratio = clamped(raw, p.min_coeff, p.max_coeff);
      if (std::fabs(raw * p.weight_decay - 1) > 1e-5) {  // else the update is weight decay alone
        const double kept = p.coeff_beta * p.average, taken = (1.0 - p.coeff_beta) * ratio;
        p.average = kept + taken;
        ++p.averaged;
      }
    }
    move(p, p.lr * ratio, update);
  }

  void begin_compression() override {
    for (Parameter& p : parameters) {
      if (!p.compress) continue;
      const double c2 = p.correction(p.beta2, p.steps);
      for (const float v : p.variance) {
        p.fresh_variance.push_back(static_cast<float>(static_cast<double>(std::max(v, p.floor)) * c2));
      }
    }
    set_scales();
  }

  // Momenta of all tensors become alike in size, so that one scale of signs fits them all.
  void set_scales() {
    const auto root_mean_square = [](const Parameter& p) {
      return std::sqrt(squares(p.momentum) / static_cast<double>(p.momentum.size()));
    };
    double total = 0, tensors = 0;
    for (const Parameter& p : parameters) {
      if (!p.compress || p.momentum.empty()) continue;
      total += root_mean_square(p);
      tensors += 1;
    }
    for (Parameter& p : parameters) {
      if (!p.compress || p.momentum.empty() || !(root_mean_square(p) > 0)) continue;
      p.scale = static_cast<float>(clamped(total / tensors / root_mean_square(p), 0x1p-10, 0x1p10));
    }
  }

  void compressed_step(Parameter& p, const Numbers& before) override {
    ++p.steps;
    if (p.value.empty()) return;
    const Constants c(p);
    Numbers without_decay(p.value.size()), update(p.value.size());
    float largest = 0;  // of the old root of the variance over the fresh one
    for (size_t k = 0; k < update.size(); ++k) {
      const float g = std::fmaf(-c.beta1, before[k], p.momentum[k]) / c.rest1;
      p.fresh_variance[k] = std::fmaf(c.beta2, p.fresh_variance[k], (c.rest2 * g) * g);
      const float frozen = std::sqrt(p.variance[k] > p.floor ? p.variance[k] : p.floor) + c.eps;
      const float fresh = std::fmaf(std::sqrt(p.fresh_variance[k]), c.unbias2, c.eps);
      if (frozen / fresh > largest) largest = frozen / fresh;  // a NaN is not larger
      without_decay[k] = c.unbias1 * p.direction(k, frozen, rules().exchanges);
      update[k] = std::fmaf(c.decay, p.value[k], without_decay[k]);
    }
    if (p.adapt)
      p.factor = next_factor(p, static_cast<double>(largest), squares(without_decay), squares(update));
    move(p, p.adapt ? (p.lr * p.coefficient()) * p.factor : p.lr, update);
  }

  // From the largest ratio of the roots and the sums of squares of the update without and with decay.
  static double next_factor(const Parameter& p, double largest, double without_decay, double update) {
    double f = std::min(largest, static_cast<double>(std::numeric_limits<float>::max()));
    if (p.weight_decay > 0 && update > 0) {
      const double k = std::min(1.0, std::sqrt(without_decay) / std::sqrt(update));
      const double scaled = f * k, rest = 1.0 - k;
      f = scaled + rest;
    }
    f = clamped(f, p.factor_min, p.factor_max);
    return clamped(f, (1.0 - p.factor_threshold) * p.factor, (1.0 + p.factor_threshold) * p.factor);
  }
};

}  // namespace pacer::testing
