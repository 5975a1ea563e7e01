// What 1-bit Adam and 1-bit LAMB have in common, as a textbook has it (Tang et al., arXiv:2102.02888, and Li
// et al., arXiv:2104.06069, algorithm 1 of each): a warm-up, a variance that freezes, and a momentum that
// travels as signs. All ranks are a loop in one process. Written from the definitions and from nothing in
// pacer; each operation rounds where the definition says so, and therefore optimizers must agree with it to
// the bit. How a parameter moves is each method's own (onebit_adam_reference.h, onebit_lamb_reference.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "support/kernels/onebit_exchange.h"
#include "support/optimizers/onebit_gradients.h"

namespace pacer::testing {

struct OneBitMethodRules : TextbookGradientRules {
  bool exchanges = true;    // momentum goes through signs
  int64_t freeze_step = 1;  // 0: whoever steps calls freeze()
  double variance_floor = 0.01;
  bool l1 = false;
  bool block_scales = false;
};

struct OneBitMethodParameter {
  // Of its group.
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool bias_correction = true, compress = true;
  // Its state; `value` is what fp32 or the master copy holds.
  std::vector<float> value, momentum, variance;
  int64_t steps = 0;
  float floor = 0;      // under the frozen variance
  bool is_new = false;  // all of the variance is zero
  float scale = 1;      // the momentum is multiplied by it before it travels
  size_t offset = 0;    // in the flat buffer

  static double one_minus_power(double base, int64_t exponent) {
    return static_cast<double>(1 -
                               std::pow(static_cast<long double>(base), static_cast<long double>(exponent)));
  }
  double correction(double beta, int64_t t) const { return bias_correction ? one_minus_power(beta, t) : 1; }

  // The largest |m| / sqrt(v) of Adam: with weights w_i of gradients in m and x_i of their squares in v it is
  // the root of the sum of w_i^2 / x_i; where that has no bound, 1 / sqrt(1 - beta2).
  float largest_direction() const {
    const double single = 1 / std::sqrt(1 - beta2), ratio = beta1 * beta1 / beta2;
    if (!(ratio < 1)) return static_cast<float>(single);
    return static_cast<float>(std::min(single, (1 - beta1) * single / std::sqrt(1 - ratio)));
  }
  // Momentum over the root of the frozen variance. An element without any variance follows no signs, unless
  // all of its parameter is new.
  float direction(size_t k, float divisor, bool from_signs) const {
    if (from_signs && variance[k] == 0 && !is_new) return 0;
    const float quotient = momentum[k] / divisor, most = largest_direction();
    return quotient > most ? most : quotient < -most ? -most : quotient;
  }
};

template <class OwnRules, class OwnParameter>
class OneBitMethodTextbook {
 public:
  using Rules = OwnRules;
  using Parameter = OwnParameter;
  using Numbers = std::vector<float>;
  using Gradients = TextbookGradients;

  OneBitMethodTextbook(Rules rules, std::vector<Parameter> of_all)
      : parameters(std::move(of_all)), rules_(std::move(rules)) {
    exchange.world_size = static_cast<size_t>(rules_.world_size);
    exchange.l1 = rules_.l1;
    exchange.block_scales = rules_.block_scales;
    for (Parameter& p : parameters) {
      p.momentum.assign(p.value.size(), 0);
      p.variance.assign(p.value.size(), 0);
      if (p.compress) p.offset = exchange.add(p.value.size());
    }
    exchange.start();
  }
  virtual ~OneBitMethodTextbook() = default;

  // Whether the next step sends signs.
  bool exchanges_next() const { return frozen_at && sends_signs(attempts + 1); }

  // `clip` multiplies the mean gradient. A gradient that is not finite uses up the attempt and nothing else.
  void step(const Gradients& gradients, double clip = 1) {
    ++attempts;
    if (!all_finite(gradients)) {
      ++skipped;
    } else if (frozen_at) {
      frozen_step(gradients, clip);
    } else {
      for (size_t i = 0; i < parameters.size(); ++i) full_step(i, gradients, clip);
    }
    if (!frozen_at && rules_.freeze_step > 0 && attempts >= rules_.freeze_step) freeze();
  }

  // Postponed where all of the variance is zero.
  void freeze() {
    const auto before = parameters;
    for (Parameter& p : parameters) {
      if (!p.compress || p.steps == 0) continue;
      const double c2 = p.correction(p.beta2, p.steps);
      for (float& v : p.variance) v = static_cast<float>(static_cast<double>(v) / c2);
    }
    if (!set_floors()) {
      parameters = before;
      return;
    }
    count_unstepped();
    begin_compression();
    frozen_at = attempts;
  }

  std::vector<Parameter> parameters;
  // Multiplies instead of `clip` the gradients of each rank that travel as signs; empty: `clip` does.
  std::vector<double> clips_of_ranks;
  TextbookExchange exchange;
  int64_t attempts = 0, skipped = 0;
  std::optional<int64_t> frozen_at;

 protected:
  // Parameter i's step with the mean gradient: in warm-up, and for ever where it is not compressed.
  virtual void full_step(size_t i, const Gradients& gradients, double clip) = 0;
  // The step of a compressed parameter, which has its new momentum and had this one before.
  virtual void compressed_step(Parameter& p, const Numbers& momentum_before) = 0;
  // What else the method does as the variance freezes, and in each step after it once momenta are new.
  virtual void begin_compression() {}
  virtual void before_compressed_steps(const Gradients&, double) {}
  virtual bool sends_signs(int64_t) const { return rules_.exchanges; }

  static double squares(const Numbers& values) {
    return TextbookExchange::sum(values, 0, values.size(), /*magnitudes=*/false);
  }
  static double magnitudes(const Numbers& values) {
    return TextbookExchange::sum(values, 0, values.size(), /*magnitudes=*/true);
  }

  std::optional<Numbers> mean_of(const Gradients& gradients, size_t i, double clip) const {
    return mean_gradient(rules_, gradients, i, parameters[i].value.size(), clip);
  }

  // From the variances as they are. False where all of them are zero.
  bool set_floors() {
    double total = 0, elements = 0;
    for (const Parameter& p : parameters) {
      if (!p.compress) continue;
      total += magnitudes(p.variance);
      elements += static_cast<double>(p.variance.size());
    }
    for (Parameter& p : parameters) {
      const double own = magnitudes(p.variance);
      p.is_new = own == 0;
      const double average =
          own > 0 ? own / static_cast<double>(p.variance.size()) : total / std::max(elements, 1.0);
      p.floor = static_cast<float>(rules_.variance_floor * average);
    }
    return total > 0 || elements == 0;  // where there is nothing to compress, nothing is waited for
  }

  const Rules& rules() const { return rules_; }

 private:
  // Tensors that never took a step count as if they had taken all. (Tests have one compressed group.)
  void count_unstepped() {
    int64_t most = 0;
    for (const auto& p : parameters) most = p.compress ? std::max(most, p.steps) : most;
    for (auto& p : parameters) {
      if (p.compress && p.steps == 0) p.steps = most;
    }
  }

  void frozen_step(const Gradients& gradients, double clip) {
    std::vector<Numbers> before;
    for (const Parameter& p : parameters) before.push_back(p.momentum);
    if (sends_signs(attempts)) {
      exchange_momentum(gradients, clip);
    } else {
      for (size_t i = 0; i < parameters.size(); ++i) {
        Parameter& p = parameters[i];
        if (p.compress) p.momentum = new_momentum(p, mean_of(gradients, i, clip), 1);
      }
    }
    before_compressed_steps(gradients, clip);
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].compress) {
        compressed_step(parameters[i], before[i]);
      } else {
        full_step(i, gradients, clip);
      }
    }
  }

  void exchange_momentum(const Gradients& gradients, double clip) {
    std::vector<Numbers> inputs;
    for (const auto& of_rank : gradients) {
      const double factor = clips_of_ranks.empty() ? clip : clips_of_ranks[inputs.size()];
      Numbers& flat = inputs.emplace_back(exchange.is_real.size(), 0.0f);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const Parameter& p = parameters[i];
        if (!p.compress) continue;
        const Numbers own = new_momentum(p, of_rank[i], static_cast<float>(factor));
        for (size_t k = 0; k < own.size(); ++k) flat[p.offset + k] = own[k] * p.scale;
      }
    }
    const Numbers result = exchange.mean(inputs);
    for (Parameter& p : parameters) {
      if (!p.compress) continue;
      for (size_t k = 0; k < p.momentum.size(); ++k) p.momentum[k] = result[p.offset + k] / p.scale;
    }
  }

  // b1 m + (1 - b1) g; a gradient that is missing is zero.
  static Numbers new_momentum(const Parameter& p, const std::optional<Numbers>& gradient, float factor) {
    const auto b1 = static_cast<float>(p.beta1), rest = static_cast<float>(1 - p.beta1);
    Numbers momentum(p.momentum.size());
    for (size_t k = 0; k < momentum.size(); ++k) {
      const float g = gradient ? (*gradient)[k] : 0.0f;
      momentum[k] = std::fmaf(b1, p.momentum[k], rest * (factor * g));
    }
    return momentum;
  }

  Rules rules_;
};

}  // namespace pacer::testing
