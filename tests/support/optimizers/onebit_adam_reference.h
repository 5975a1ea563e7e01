// 1-bit Adam as a textbook has it (Tang et al., arXiv:2102.02888, algorithm 1; AdamW: arXiv:1711.05101), and
// refreshes of its variance. Written from the definition and from nothing in pacer; what it shares with 1-bit
// LAMB is in onebit_method_reference.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "support/optimizers/onebit_method_reference.h"

namespace pacer::testing {

struct OneBitAdamRules : OneBitMethodRules {
  int64_t refresh_every = 0;
};

class OneBitAdamTextbook : public OneBitMethodTextbook<OneBitAdamRules, OneBitMethodParameter> {
 public:
  using OneBitMethodTextbook::OneBitMethodTextbook;

  // |bias-corrected variance|_1 over the compressed parameters.
  double variance_norm() const {
    double norm = 0;
    for (const Parameter& p : parameters) {
      if (p.compress && p.steps > 0) norm += magnitudes(p.variance) / p.correction(p.beta2, p.steps);
    }
    return norm;
  }

 private:
  bool refreshes(int64_t attempt) const {
    return rules().refresh_every > 0 && (attempt - *frozen_at) % rules().refresh_every == 0;
  }
  bool sends_signs(int64_t attempt) const override { return rules().exchanges && !refreshes(attempt); }

  void full_step(size_t i, const Gradients& gradients, double clip) override {
    Parameter& p = parameters[i];
    const auto gradient = mean_of(gradients, i, clip);
    if (!gradient) return;
    ++p.steps;
    const auto b1 = static_cast<float>(p.beta1), rest1 = static_cast<float>(1 - p.beta1);
    const auto b2 = static_cast<float>(p.beta2), rest2 = static_cast<float>(1 - p.beta2);
    const auto eps = static_cast<float>(p.eps), decay = static_cast<float>(p.lr * p.weight_decay);
    const auto size = static_cast<float>(p.lr / p.correction(p.beta1, p.steps));
    const auto unbias = static_cast<float>(1 / std::sqrt(p.correction(p.beta2, p.steps)));
    for (size_t k = 0; k < p.value.size(); ++k) {
      const float g = (*gradient)[k];
      if (decay != 0) p.value[k] = std::fmaf(-decay, p.value[k], p.value[k]);
      p.momentum[k] = std::fmaf(b1, p.momentum[k], rest1 * g);
      p.variance[k] = std::fmaf(b2, p.variance[k], (rest2 * g) * g);
      const float denominator = std::fmaf(std::sqrt(p.variance[k]), unbias, eps);
      p.value[k] = std::fmaf(-size, p.momentum[k] / denominator, p.value[k]);
    }
  }

  void before_compressed_steps(const Gradients& gradients, double clip) override {
    if (!refreshes(attempts)) return;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].compress) refresh(parameters[i], mean_of(gradients, i, clip));
    }
    set_floors();
  }

  // One step of the variance that stands for all since the last refresh.
  void refresh(Parameter& p, const std::optional<Numbers>& gradient) const {
    const long double power =
        std::pow(static_cast<long double>(p.beta2), static_cast<long double>(rules().refresh_every));
    const auto keep = static_cast<float>(power), take = static_cast<float>(1 - power);
    for (size_t k = 0; k < p.variance.size(); ++k) {
      const float g = gradient ? (*gradient)[k] : 0.0f;
      p.variance[k] = std::fmaf(keep, p.variance[k], (take * g) * g);
    }
  }

  void compressed_step(Parameter& p, const Numbers&) override {
    ++p.steps;
    const auto decay = static_cast<float>(p.lr * p.weight_decay), eps = static_cast<float>(p.eps);
    const auto size = static_cast<float>(p.lr / p.correction(p.beta1, p.steps));
    for (size_t k = 0; k < p.value.size(); ++k) {
      const float denominator = std::sqrt(std::max(p.variance[k], p.floor)) + eps;
      p.value[k] = std::fmaf(-decay, p.value[k], p.value[k]);
      p.value[k] = std::fmaf(-size, p.direction(k, denominator, rules().exchanges), p.value[k]);
    }
  }
};

}  // namespace pacer::testing
