// 1-bit LAMB as a textbook has it (Li et al., arXiv:2104.06069, algorithm 1; LAMB: arXiv:1904.00962): all
// ranks are a loop in one process. Written from the definition and from nothing in pacer; each operation
// rounds where the definition says so, and therefore optimizers must agree with it to the bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "support/onebit_adam_exchange.h"
#include "support/onebit_gradients.h"

namespace pacer::testing {

struct OneBitLambRules : TextbookGradientRules {
  bool exchanges = true;    // momentum goes through signs
  int64_t freeze_step = 1;  // 0: whoever steps calls freeze()
  double variance_floor = 0.01;
  bool l1 = false;
  bool block_scales = false;
};

struct OneBitLambParameter {
  // Of its group.
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-6, weight_decay = 0;
  double min_coeff = 0.01, max_coeff = 10, coeff_beta = 0.9;
  double factor_min = 0.5, factor_max = 4, factor_threshold = 0.1;
  bool bias_correction = false, adapt = true, compress = true;
  // Its state; `value` is what fp32 or the master copy holds.
  std::vector<float> value, momentum, variance, fresh_variance;
  int64_t steps = 0;
  double average = 0;    // of the trust ratios of warm-up, not yet corrected for its start at zero
  int64_t averaged = 0;  // how many they were
  double factor = 1;     // f, the last one
  float scale = 1, floor = 0;
  size_t offset = 0;  // in the flat buffer

  static double one_minus_power(double base, int64_t exponent) {
    return static_cast<double>(1 -
                               std::pow(static_cast<long double>(base), static_cast<long double>(exponent)));
  }
  double correction(double beta, int64_t t) const { return bias_correction ? one_minus_power(beta, t) : 1; }
  double coefficient() const { return averaged == 0 ? 1 : average / one_minus_power(coeff_beta, averaged); }
};

class OneBitLambTextbook {
 public:
  using Numbers = std::vector<float>;
  using Gradients = TextbookGradients;

  OneBitLambTextbook(OneBitLambRules rules, std::vector<OneBitLambParameter> of_all)
      : parameters(std::move(of_all)), rules_(std::move(rules)) {
    exchange.world_size = static_cast<size_t>(rules_.world_size);
    exchange.l1 = rules_.l1;
    exchange.block_scales = rules_.block_scales;
    for (OneBitLambParameter& p : parameters) {
      p.momentum.assign(p.value.size(), 0);
      p.variance.assign(p.value.size(), 0);
      if (p.compress) p.offset = exchange.add(p.value.size());
    }
    exchange.start();
  }

  // Whether the next step sends signs.
  bool exchanges_next() const { return frozen_at && rules_.exchanges; }

  // `clip` multiplies the mean gradient. A gradient that is not finite uses up the attempt and nothing else.
  void step(const Gradients& gradients, double clip = 1) {
    ++attempts;
    if (!all_finite(gradients)) {
      ++skipped;
    } else if (frozen_at) {
      frozen_step(gradients, clip);
    } else {
      for (size_t i = 0; i < parameters.size(); ++i) lamb(i, gradients, clip);
    }
    if (!frozen_at && rules_.freeze_step > 0 && attempts >= rules_.freeze_step) freeze();
  }

  // Postponed where all of the variance is zero.
  void freeze() {
    const auto before = parameters;
    for (OneBitLambParameter& p : parameters) {
      if (!p.compress || p.steps == 0) continue;
      const double c2 = p.correction(p.beta2, p.steps);
      for (float& v : p.variance) v = static_cast<float>(static_cast<double>(v) / c2);
    }
    if (!set_floors()) {
      parameters = before;
      return;
    }
    count_unstepped();
    for (OneBitLambParameter& p : parameters) {
      if (!p.compress) continue;
      const double c2 = p.correction(p.beta2, p.steps);
      for (const float v : p.variance) {
        p.fresh_variance.push_back(static_cast<float>(static_cast<double>(std::max(v, p.floor)) * c2));
      }
    }
    set_scales();
    frozen_at = attempts;
  }

  std::vector<OneBitLambParameter> parameters;
  TextbookExchange exchange;
  int64_t attempts = 0, skipped = 0;
  std::optional<int64_t> frozen_at;

 private:
  // Tensors that never took a step count as if they had taken all. (Tests have one compressed group.)
  void count_unstepped() {
    int64_t most = 0;
    for (const auto& p : parameters) most = p.compress ? std::max(most, p.steps) : most;
    for (auto& p : parameters) {
      if (p.compress && p.steps == 0) p.steps = most;
    }
  }

  // What of a step is the same for all elements of a parameter, each rounded from double once.
  struct Constants {
    explicit Constants(const OneBitLambParameter& p)
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

  static double squares(const Numbers& values) {
    return TextbookExchange::sum(values, 0, values.size(), /*magnitudes=*/false);
  }
  static double magnitudes(const Numbers& values) {
    return TextbookExchange::sum(values, 0, values.size(), /*magnitudes=*/true);
  }
  static double clamped(double value, double low, double high) {
    return value < low ? low : value > high ? high : value;
  }
  static void move(OneBitLambParameter& p, double size, const Numbers& update) {
    const auto rounded = static_cast<float>(size);
    for (size_t k = 0; k < update.size(); ++k) p.value[k] = std::fmaf(-rounded, update[k], p.value[k]);
  }

  // LAMB, and the average of its trust ratios.
  void lamb(size_t i, const Gradients& gradients, double clip) {
    OneBitLambParameter& p = parameters[i];
    const auto gradient = mean_gradient(rules_, gradients, i, p.value.size(), clip);
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

  bool set_floors() {
    double total = 0, elements = 0;
    for (const OneBitLambParameter& p : parameters) {
      if (!p.compress) continue;
      total += magnitudes(p.variance);
      elements += static_cast<double>(p.variance.size());
    }
    for (OneBitLambParameter& p : parameters) {
      const double own = magnitudes(p.variance);
      const double average =
          own > 0 ? own / static_cast<double>(p.variance.size()) : total / std::max(elements, 1.0);
      p.floor = static_cast<float>(rules_.variance_floor * average);
    }
    return total > 0 || elements == 0;  // where there is nothing to compress, nothing is waited for
  }

  // Momenta of all tensors become alike in size, so that one scale of signs fits them all.
  void set_scales() {
    const auto root_mean_square = [](const OneBitLambParameter& p) {
      return std::sqrt(squares(p.momentum) / static_cast<double>(p.momentum.size()));
    };
    double total = 0, tensors = 0;
    for (const OneBitLambParameter& p : parameters) {
      if (!p.compress || p.momentum.empty()) continue;
      total += root_mean_square(p);
      tensors += 1;
    }
    for (OneBitLambParameter& p : parameters) {
      if (!p.compress || p.momentum.empty() || !(root_mean_square(p) > 0)) continue;
      p.scale = static_cast<float>(clamped(total / tensors / root_mean_square(p), 0x1p-10, 0x1p10));
    }
  }

  void frozen_step(const Gradients& gradients, double clip) {
    std::vector<Numbers> before;
    for (const OneBitLambParameter& p : parameters) before.push_back(p.momentum);
    if (rules_.exchanges) {
      exchange_momentum(gradients, clip);
    } else {
      for (size_t i = 0; i < parameters.size(); ++i) {
        OneBitLambParameter& p = parameters[i];
        if (p.compress)
          p.momentum = new_momentum(p, mean_gradient(rules_, gradients, i, p.value.size(), clip), 1);
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].compress) {
        update(parameters[i], before[i]);
      } else {
        lamb(i, gradients, clip);
      }
    }
  }

  void exchange_momentum(const Gradients& gradients, double clip) {
    std::vector<Numbers> inputs;
    for (const auto& of_rank : gradients) {
      Numbers& flat = inputs.emplace_back(exchange.is_real.size(), 0.0f);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const OneBitLambParameter& p = parameters[i];
        if (!p.compress) continue;
        const Numbers own = new_momentum(p, of_rank[i], static_cast<float>(clip));
        for (size_t k = 0; k < own.size(); ++k) flat[p.offset + k] = own[k] * p.scale;
      }
    }
    const Numbers result = exchange.mean(inputs);
    for (OneBitLambParameter& p : parameters) {
      if (!p.compress) continue;
      for (size_t k = 0; k < p.momentum.size(); ++k) p.momentum[k] = result[p.offset + k] / p.scale;
    }
  }

  // b1 m + (1 - b1) g; a gradient that is missing is zero.
  static Numbers new_momentum(const OneBitLambParameter& p, const std::optional<Numbers>& gradient,
                              float factor) {
    const Constants c(p);
    Numbers momentum(p.momentum.size());
    for (size_t k = 0; k < momentum.size(); ++k) {
      const float g = gradient ? (*gradient)[k] : 0.0f;
      momentum[k] = std::fmaf(c.beta1, p.momentum[k], c.rest1 * (factor * g));
    }
    return momentum;
  }

  static void update(OneBitLambParameter& p, const Numbers& before) {
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
      without_decay[k] = c.unbias1 * (p.momentum[k] / frozen);
      update[k] = std::fmaf(c.decay, p.value[k], without_decay[k]);
    }
    if (p.adapt)
      p.factor = next_factor(p, static_cast<double>(largest), squares(without_decay), squares(update));
    move(p, p.adapt ? (p.lr * p.coefficient()) * p.factor : p.lr, update);
  }

  // From the largest ratio of the roots and the sums of squares of the update without and with decay.
  static double next_factor(const OneBitLambParameter& p, double largest, double without_decay,
                            double update) {
    double f = std::min(largest, static_cast<double>(std::numeric_limits<float>::max()));
    if (p.weight_decay > 0 && update > 0) {
      const double k = std::min(1.0, std::sqrt(without_decay) / std::sqrt(update));
      const double scaled = f * k, rest = 1.0 - k;
      f = scaled + rest;
    }
    f = clamped(f, p.factor_min, p.factor_max);
    return clamped(f, (1.0 - p.factor_threshold) * p.factor, (1.0 + p.factor_threshold) * p.factor);
  }

  OneBitLambRules rules_;
};

}  // namespace pacer::testing
