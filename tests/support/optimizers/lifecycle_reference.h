// Every optimizer of pacer restated in fp64 from the papers and docs/*.md, for a single rank, tensor by
// tensor and with no memory but vectors: what it must do whatever users do to parameters between steps.
// Options come from the optimizer's exported state, so that an optimizer that is registered is restated at
// once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "support/optimizers/lifecycle_parameter.h"
#include "support/optimizers/muon_reference.h"

namespace pacer::testing {

class LifecycleReference {
 public:
  std::vector<LifecycleParameter> parameters;
  int64_t attempts = 0;
  std::optional<int64_t> frozen_at;

  // [parameter]; none: undefined. A 1-bit optimizer leaves alone what is not trained.
  void step(const std::vector<std::optional<Doubles>>& gradients) {
    ++attempts;
    const bool is_onebit = parameters.front().options.freeze_step > 0;
    const bool frozen = frozen_at.has_value();
    if (frozen) step_compressed(gradients);
    step_exchanged_matrices(gradients);
    for (size_t i = 0; i < parameters.size(); ++i) {
      LifecycleParameter& x = parameters[i];
      if ((frozen && x.options.compress) || !gradients[i] || (is_onebit && !x.trained)) continue;
      if (x.options.is_muon && x.options.exchanges) continue;
      x.options.is_lamb      ? lamb(x, *gradients[i])
      : x.options.is_muon    ? MuonReference::step(x, *gradients[i])
      : x.options.is_lion    ? lion(x, *gradients[i])
      : x.options.is_sgd     ? sgd(x, *gradients[i])
      : x.options.is_rmsprop ? rmsprop(x, *gradients[i])
      : x.options.averages   ? schedule_free(x, *gradients[i])
                             : adam(x, *gradients[i]);
    }
    if (is_onebit && !frozen && attempts >= parameters.front().options.freeze_step) freeze();
  }

 private:
  static double clamped(double value, double low, double high) {
    return std::min(std::max(value, low), high);
  }

  void step_exchanged_matrices(const std::vector<std::optional<Doubles>>& gradients) {
    std::vector<LifecycleParameter*> matrices;
    std::vector<std::optional<Doubles>> of_matrices;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].options.is_muon || !parameters[i].options.exchanges) continue;
      matrices.push_back(&parameters[i]);
      of_matrices.push_back(gradients[i]);
    }
    if (!matrices.empty()) MuonReference::step_together(matrices, of_matrices);
  }

  static void moments(LifecycleParameter& x, const Doubles& g) {
    ++x.t;
    const LifecycleOptions& o = x.options;
    for (size_t k = 0; k < g.size(); ++k) {
      const double gradient = o.l2 ? g[k] + o.decay * x.p[k] : g[k];
      x.m[k] = o.beta1 * x.m[k] + (1 - o.beta1) * gradient;
      x.v[k] = o.beta2 * x.v[k] + (1 - o.beta2) * gradient * gradient;
      x.largest_v[k] = std::max(x.largest_v[k], x.v[k]);
    }
  }

  static void adam(LifecycleParameter& x, const Doubles& g) {
    const LifecycleOptions& o = x.options;
    moments(x, g);
    for (size_t k = 0; k < g.size(); ++k) {
      if (!o.l2) x.p[k] -= o.lr * o.decay * x.p[k];
      const double v = o.amsgrad ? x.largest_v[k] : x.v[k];
      x.p[k] -=
          o.lr / o.correction(o.beta1, x.t) * x.m[k] / (std::sqrt(v / o.correction(o.beta2, x.t)) + o.eps);
    }
  }

  static void lion(LifecycleParameter& x, const Doubles& g) {
    const LifecycleOptions& o = x.options;
    ++x.t;
    for (size_t k = 0; k < g.size(); ++k) {
      const double direction = o.beta1 * x.m[k] + (1 - o.beta1) * g[k];
      const double sign = direction > 0 ? 1 : direction < 0 ? -1 : 0;
      x.p[k] -= o.lr * (sign + o.decay * x.p[k]);
      x.m[k] = o.beta2 * x.m[k] + (1 - o.beta2) * g[k];
    }
  }

  static void sgd(LifecycleParameter& x, const Doubles& g) {
    const LifecycleOptions& o = x.options;
    ++x.t;
    for (size_t k = 0; k < g.size(); ++k) {
      const double gradient = (o.maximizes ? -g[k] : g[k]) + o.decay * x.p[k];
      x.m[k] = x.t == 1 ? gradient : o.momentum * x.m[k] + (1 - o.dampening) * gradient;
      const double ahead = o.nesterov ? gradient + o.momentum * x.m[k] : x.m[k];
      x.p[k] -= o.lr * (o.momentum > 0 ? ahead : gradient);
    }
  }
  // The mean of gradients is in place of a largest second moment.
  static void rmsprop(LifecycleParameter& x, const Doubles& g) {
    const LifecycleOptions& o = x.options;
    ++x.t;
    for (size_t k = 0; k < g.size(); ++k) {
      const double gradient = (o.maximizes ? -g[k] : g[k]) + o.decay * x.p[k];
      double& mean = x.largest_v[k];
      x.v[k] = o.alpha * x.v[k] + (1 - o.alpha) * gradient * gradient;
      mean = o.alpha * mean + (1 - o.alpha) * gradient;
      const double variance = o.centered ? std::max(0.0, x.v[k] - mean * mean) : x.v[k];
      x.m[k] = o.momentum * x.m[k] + gradient / (std::sqrt(variance) + o.eps);
      x.p[k] -= o.lr * x.m[k];
    }
  }
  // As the paper's algorithm 1 has it: z moves, the average takes it in, and p lies between them.
  static void schedule_free(LifecycleParameter& x, const Doubles& g) {
    const LifecycleOptions& o = x.options;
    if (++x.t == 1) x.m = x.p;
    const auto t = static_cast<double>(x.t);
    const double lr = t < o.warmup_steps ? o.lr * t / o.warmup_steps : o.lr;
    x.lr_max = std::max(x.lr_max, lr);
    const double weight = std::pow(t, o.r) * std::pow(x.lr_max, o.weight_lr_power);
    x.weight_sum += weight;
    const double share = weight / x.weight_sum;
    for (size_t k = 0; k < g.size(); ++k) {
      x.v[k] = o.beta2 * x.v[k] + (1 - o.beta2) * g[k] * g[k];
      const double u = g[k] / (std::sqrt(x.v[k] / o.correction(o.beta2, x.t)) + o.eps) + o.decay * x.p[k];
      double averaged = (x.p[k] - (1 - o.beta1) * x.m[k]) / o.beta1;
      x.m[k] -= lr * u;
      averaged = (1 - share) * averaged + share * x.m[k];
      x.p[k] = (1 - o.beta1) * x.m[k] + o.beta1 * averaged;
    }
  }

  static void lamb(LifecycleParameter& x, const Doubles& g) {
    const LifecycleOptions& o = x.options;
    moments(x, g);
    Doubles u(g.size());
    for (size_t k = 0; k < g.size(); ++k) {
      u[k] = x.m[k] / o.correction(o.beta1, x.t) / (std::sqrt(x.v[k] / o.correction(o.beta2, x.t)) + o.eps) +
             o.decay * x.p[k];
    }
    double ratio = 1;
    if (o.adapt && squares(x.p) > 0 && squares(u) > 0) {
      const double raw = std::sqrt(squares(x.p) / squares(u));
      ratio = clamped(raw, o.min_coeff, o.max_coeff);
      if (std::abs(raw * o.decay - 1) >= 1e-5) {
        x.average = o.coeff_beta * x.average + (1 - o.coeff_beta) * ratio;
        x.averaged += 1;
      }
    }
    for (size_t k = 0; k < g.size(); ++k) x.p[k] -= o.lr * ratio * u[k];
  }

  std::vector<LifecycleParameter*> compressed() {
    std::vector<LifecycleParameter*> all;
    for (LifecycleParameter& x : parameters) {
      if (x.options.compress) all.push_back(&x);
    }
    return all;
  }

  void set_floors() {
    double total = 0, elements = 0;
    const auto sum_of = [](const Doubles& v) {
      double sum = 0;
      for (const double x : v) sum += x;
      return sum;
    };
    for (const auto* x : compressed()) total += sum_of(x->v), elements += static_cast<double>(x->v.size());
    for (auto* x : compressed()) {
      const double own = sum_of(x->v);
      x->is_new = own == 0;
      x->floor =
          x->options.floor_share * (own > 0 ? own / static_cast<double>(x->v.size()) : total / elements);
    }
  }

  void freeze() {
    frozen_at = attempts;
    int64_t most = 0;
    double magnitude = 0, count = 0;
    for (auto* x : compressed()) {
      for (double& v : x->v) v = x->t > 0 ? v / x->options.correction(x->options.beta2, x->t) : v;
      most = std::max(most, x->t);
    }
    set_floors();
    for (auto* x : compressed()) {
      if (x->t == 0) x->t = most_of_group(x->group, most);
      x->worker_error.assign(x->p.size(), 0), x->server_error.assign(x->p.size(), 0);
      magnitude += std::sqrt(squares(x->m) / static_cast<double>(x->m.size()));
      count += 1;
    }
    for (auto* x : compressed()) {
      if (!x->options.is_lamb) continue;
      const double own = std::sqrt(squares(x->m) / static_cast<double>(x->m.size()));
      const double mean = x->options.travels_alone ? own : magnitude / count;
      x->scale = own > 0 ? clamped(mean / own, 1.0 / 1024, 1024) : 1;
      x->coefficient = x->averaged > 0 ? x->average / (1 - std::pow(x->options.coeff_beta, x->averaged)) : 1;
      for (const double v : x->v) {
        x->fresh.push_back(std::max(v, x->floor) * x->options.correction(x->options.beta2, x->t));
      }
    }
  }
  int64_t most_of_group(size_t group, int64_t otherwise) const {
    int64_t most = 0;
    for (const auto& x : parameters) {
      if (x.group == group && x.options.compress) most = std::max(most, x.t);
    }
    return most > 0 ? most : otherwise;
  }

  void step_compressed(const std::vector<std::optional<Doubles>>& gradients) {
    const std::vector<LifecycleParameter*> all = compressed();
    if (all.empty()) return;
    const LifecycleOptions& run = all.front()->options;
    const bool refreshes = run.refresh_every > 0 && (attempts - *frozen_at) % run.refresh_every == 0;
    std::vector<Doubles> before, next;
    for (size_t i = 0; i < parameters.size(); ++i) {
      LifecycleParameter& x = parameters[i];
      if (!x.options.compress) continue;
      before.push_back(x.m);
      const bool has = x.trained && gradients[i].has_value();
      const bool moves = x.trained || (run.exchanges && !refreshes);
      Doubles u = x.m;
      for (size_t k = 0; moves && k < u.size(); ++k) {
        const double g = has ? (*gradients[i])[k] : 0;
        u[k] = x.options.beta1 * u[k] + (1 - x.options.beta1) * g;
        if (refreshes) {
          const double keep = std::pow(x.options.beta2, static_cast<double>(run.refresh_every));
          x.v[k] = keep * x.v[k] + (1 - keep) * g * g;
        }
      }
      next.push_back(std::move(u));
    }
    if (run.exchanges && !refreshes) {
      run.travels_alone ? exchange_each(all, next) : exchange(all, next);
    }
    for (size_t j = 0; j < all.size(); ++j) all[j]->m = next[j];
    if (refreshes) set_floors();
    for (size_t j = 0; j < all.size(); ++j) {
      const bool from_signs = run.exchanges && !refreshes;
      if (!all[j]->trained) continue;
      all[j]->options.is_lamb ? update_lamb(*all[j], before[j], from_signs)
                              : update_adam(*all[j], from_signs);
    }
  }

  static void exchange_each(const std::vector<LifecycleParameter*>& all, std::vector<Doubles>& values) {
    for (size_t j = 0; j < all.size(); ++j) {
      std::vector<Doubles> own = {std::move(values[j])};
      exchange({all[j]}, own);
      values[j] = std::move(own.front());
    }
  }
  // Signs of all elements, worker and server, both with an error that they keep.
  static void exchange(const std::vector<LifecycleParameter*>& all, std::vector<Doubles>& values) {
    for (size_t j = 0; j < all.size(); ++j) {
      for (double& u : values[j]) u *= all[j]->scale;
    }
    round_to_signs(all, values, &LifecycleParameter::worker_error, /*alignment=*/128);
    round_to_signs(all, values, &LifecycleParameter::server_error, /*alignment=*/128);
    for (size_t j = 0; j < all.size(); ++j) {
      for (double& u : values[j]) u /= all[j]->scale;
    }
  }
  static void update_adam(LifecycleParameter& x, bool from_signs) {
    ++x.t;
    const LifecycleOptions& o = x.options;
    for (size_t k = 0; k < x.p.size(); ++k) {
      x.p[k] -= o.lr * o.decay * x.p[k];
      const double divisor = std::sqrt(std::max(x.v[k], x.floor)) + o.eps;
      x.p[k] -= o.lr / o.correction(o.beta1, x.t) * x.direction(k, divisor, from_signs);
    }
  }

  static void update_lamb(LifecycleParameter& x, const Doubles& before, bool from_signs) {
    ++x.t;
    const LifecycleOptions& o = x.options;
    Doubles without_decay(x.p.size()), u(x.p.size());
    double largest = 0;
    for (size_t k = 0; k < x.p.size(); ++k) {
      const double g = (x.m[k] - o.beta1 * before[k]) / (1 - o.beta1);
      x.fresh[k] = o.beta2 * x.fresh[k] + (1 - o.beta2) * g * g;
      const double frozen = std::sqrt(std::max(x.v[k], x.floor)) + o.eps;
      largest = std::max(largest, frozen / (std::sqrt(x.fresh[k] / o.correction(o.beta2, x.t)) + o.eps));
      without_decay[k] = x.direction(k, frozen, from_signs) / o.correction(o.beta1, x.t);
      u[k] = without_decay[k] + o.decay * x.p[k];
    }
    double f = largest;
    if (o.decay > 0 && squares(u) > 0) {
      const double kept = std::min(1.0, std::sqrt(squares(without_decay) / squares(u)));
      f = f * kept + (1 - kept);
    }
    f = clamped(clamped(f, o.factor_min, o.factor_max), (1 - o.factor_threshold) * x.factor,
                (1 + o.factor_threshold) * x.factor);
    x.factor = o.adapt ? f : 1;
    for (size_t k = 0; k < x.p.size(); ++k) x.p[k] -= o.lr * (o.adapt ? x.coefficient * f : 1) * u[k];
  }
};

}  // namespace pacer::testing
