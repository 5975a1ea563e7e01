// 1-bit Adam as a textbook has it (Tang et al., arXiv:2102.02888, algorithm 1): all ranks are a loop in one
// process. Written from the definition and from nothing in pacer; each operation rounds where the definition
// says so, and therefore optimizers must agree with it to the bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "support/onebit_adam_exchange.h"
#include "support/onebit_gradients.h"

namespace pacer::testing {

struct OneBitAdamRules : TextbookGradientRules {
  bool exchanges = true;    // momentum goes through signs
  int64_t freeze_step = 1;  // 0: whoever steps calls freeze()
  int64_t refresh_every = 0;
  double variance_floor = 0.01;
  bool l1 = false;
  bool block_scales = false;
};

struct OneBitAdamParameter {
  // Of its group.
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool bias_correction = true, compress = true;
  // Its state; `value` is what fp32 or the master copy holds.
  std::vector<float> value, momentum, variance;
  int64_t steps = 0;
  float floor = 0;
  size_t offset = 0;  // in the flat buffer

  double correction(double beta, int64_t t) const {
    if (!bias_correction) return 1;
    return static_cast<double>(1 - std::pow(static_cast<long double>(beta), static_cast<long double>(t)));
  }
};

class OneBitAdamTextbook {
 public:
  using Numbers = std::vector<float>;
  using Gradients = TextbookGradients;

  OneBitAdamTextbook(OneBitAdamRules rules, std::vector<OneBitAdamParameter> of_all)
      : parameters(std::move(of_all)), rules_(std::move(rules)) {
    exchange.world_size = static_cast<size_t>(rules_.world_size);
    exchange.l1 = rules_.l1;
    exchange.block_scales = rules_.block_scales;
    for (OneBitAdamParameter& p : parameters) {
      p.momentum.assign(p.value.size(), 0);
      p.variance.assign(p.value.size(), 0);
      if (!p.compress) continue;
      p.offset = exchange.add(p.value.size());
    }
    exchange.start();
  }

  // Whether the next step sends signs.
  bool exchanges_next() const { return frozen_at && rules_.exchanges && !refreshes(attempts + 1); }

  // `clip` multiplies the mean gradient. A gradient that is not finite uses up the attempt and nothing else.
  void step(const Gradients& gradients, double clip = 1) {
    ++attempts;
    if (all_finite(gradients)) {
      if (!frozen_at) {
        for (size_t i = 0; i < parameters.size(); ++i) adamw(i, gradients, clip);
      } else {
        frozen_step(gradients, clip);
      }
    } else {
      ++skipped;
    }
    if (!frozen_at && rules_.freeze_step > 0 && attempts >= rules_.freeze_step) freeze();
  }

  // Postponed where all of the variance is zero.
  void freeze() {
    const auto before = parameters;
    for (OneBitAdamParameter& p : parameters) {
      if (!p.compress || p.steps == 0) continue;
      const double c2 = p.correction(p.beta2, p.steps);
      for (float& v : p.variance) v = static_cast<float>(static_cast<double>(v) / c2);
    }
    if (set_floors()) {
      frozen_at = attempts;
      count_unstepped();
    } else {
      parameters = before;
    }
  }

  // |bias-corrected variance|_1 over the compressed parameters.
  double variance_norm() const {
    double norm = 0;
    for (const OneBitAdamParameter& p : parameters) {
      if (!p.compress || p.steps == 0) continue;
      norm += TextbookExchange::sum(p.variance, 0, p.variance.size(), true) / p.correction(p.beta2, p.steps);
    }
    return norm;
  }

  std::vector<OneBitAdamParameter> parameters;
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

  bool refreshes(int64_t attempt) const {
    return rules_.refresh_every > 0 && (attempt - *frozen_at) % rules_.refresh_every == 0;
  }

  void adamw(size_t i, const Gradients& gradients, double clip) {
    OneBitAdamParameter& p = parameters[i];
    const auto gradient = mean_gradient(rules_, gradients, i, p.value.size(), clip);
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

  void frozen_step(const Gradients& gradients, double clip) {
    const bool with_refresh = refreshes(attempts);
    if (rules_.exchanges && !with_refresh) {
      std::vector<Numbers> inputs;
      for (const auto& of_rank : gradients) inputs.push_back(new_momentum(of_rank, static_cast<float>(clip)));
      const Numbers result = exchange.mean(inputs);
      for (OneBitAdamParameter& p : parameters) {
        if (p.compress)
          std::copy_n(result.begin() + static_cast<int64_t>(p.offset), p.value.size(), p.momentum.begin());
      }
    } else {
      std::vector<std::optional<Numbers>> means;
      for (size_t i = 0; i < parameters.size(); ++i) {
        means.push_back(mean_gradient(rules_, gradients, i, parameters[i].value.size(), clip));
      }
      const Numbers result = new_momentum(means, 1.0f);
      for (size_t i = 0; i < parameters.size(); ++i) {
        OneBitAdamParameter& p = parameters[i];
        if (!p.compress) continue;
        std::copy_n(result.begin() + static_cast<int64_t>(p.offset), p.value.size(), p.momentum.begin());
        if (with_refresh) refresh(p, means[i]);
      }
      if (with_refresh) set_floors();
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].compress) {
        update(parameters[i]);
      } else {
        adamw(i, gradients, clip);
      }
    }
  }

  // b1 m + (1 - b1) g over the flat buffer.
  Numbers new_momentum(const std::vector<std::optional<Numbers>>& gradients, float factor) const {
    Numbers flat(exchange.is_real.size(), 0);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const OneBitAdamParameter& p = parameters[i];
      if (!p.compress) continue;
      const auto b1 = static_cast<float>(p.beta1), rest = static_cast<float>(1 - p.beta1);
      for (size_t k = 0; k < p.value.size(); ++k) {
        const float g = gradients[i] ? (*gradients[i])[k] : 0.0f;
        flat[p.offset + k] = std::fmaf(b1, p.momentum[k], rest * (factor * g));
      }
    }
    return flat;
  }

  void refresh(OneBitAdamParameter& p, const std::optional<Numbers>& gradient) const {
    const long double power =
        std::pow(static_cast<long double>(p.beta2), static_cast<long double>(rules_.refresh_every));
    const auto keep = static_cast<float>(power), take = static_cast<float>(1 - power);
    for (size_t k = 0; k < p.variance.size(); ++k) {
      const float g = gradient ? (*gradient)[k] : 0.0f;
      p.variance[k] = std::fmaf(keep, p.variance[k], (take * g) * g);
    }
  }

  bool set_floors() {
    double total = 0, elements = 0;
    for (const OneBitAdamParameter& p : parameters) {
      if (!p.compress) continue;
      total += TextbookExchange::sum(p.variance, 0, p.variance.size(), true);
      elements += static_cast<double>(p.variance.size());
    }
    for (OneBitAdamParameter& p : parameters) {
      const double own = TextbookExchange::sum(p.variance, 0, p.variance.size(), true);
      const double average =
          own > 0 ? own / static_cast<double>(p.variance.size()) : total / std::max(elements, 1.0);
      p.floor = static_cast<float>(rules_.variance_floor * average);
    }
    return total > 0 || elements == 0;  // where there is nothing to compress, nothing is waited for
  }

  static void update(OneBitAdamParameter& p) {
    ++p.steps;
    const auto decay = static_cast<float>(p.lr * p.weight_decay), eps = static_cast<float>(p.eps);
    const auto size = static_cast<float>(p.lr / p.correction(p.beta1, p.steps));
    for (size_t k = 0; k < p.value.size(); ++k) {
      const float denominator = std::sqrt(std::max(p.variance[k], p.floor)) + eps;
      p.value[k] = std::fmaf(-decay, p.value[k], p.value[k]);
      p.value[k] = std::fmaf(-size, p.momentum[k] / denominator, p.value[k]);
    }
  }

  OneBitAdamRules rules_;
};

}  // namespace pacer::testing
