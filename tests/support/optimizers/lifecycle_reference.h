// Every optimizer of pacer restated in fp64 from the papers and docs/*.md, for a single rank, tensor by
// tensor and with no memory but vectors: what it must do whatever users do to parameters between steps.
// Options come from the optimizer's exported state, so that an optimizer that is registered is restated at
// once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::testing {

using Doubles = std::vector<double>;

// Options of one group, by name as they are exported.
struct LifecycleOptions {
  LifecycleOptions(const NamedTensors& state, size_t group, bool is_l2) : l2(is_l2) {
    const auto get = [&](const char* name, double otherwise) {
      const auto found = state.find("group/" + std::to_string(group) + "/" + name);
      return found == state.end() ? otherwise : found->second.to(at::kDouble).item<double>();
    };
    lr = get("lr", 0), beta1 = get("beta1", 0), beta2 = get("beta2", 0), eps = get("eps", 0);
    decay = get("weight_decay", 0), bias_correction = get("bias_correction", 0) != 0;
    amsgrad = get("amsgrad", 0) != 0;
    is_lamb = get("min_coeff", -1) >= 0;
    min_coeff = get("min_coeff", 0), max_coeff = get("max_coeff", 0), adapt = get("adapt", 1) != 0;
    coeff_beta = get("coeff_beta", 0), factor_min = get("factor_min", 0), factor_max = get("factor_max", 0);
    factor_threshold = get("factor_threshold", 0);
    freeze_step = static_cast<int64_t>(get("freeze_step", 0));
    compress = get("compress", 0) != 0;
    refresh_every = static_cast<int64_t>(get("refresh_variance_every", 0));
    floor_share = get("variance_floor", 0);
    by_blocks = get("block_scales", 0) != 0;
    exchanges = get("compress_alone", 0) != 0 && get("one_bit", 1) != 0;
    is_muon = get("orthogonalize", 0) != 0, momentum = get("momentum", 0), nesterov = get("nesterov", 0) != 0;
    matches_adamw = get("adjust_lr_fn", 0) == 0, iterations = static_cast<int64_t>(get("ns_steps", 0));
    split = static_cast<size_t>(get("split", 1));
    normalizes_rows = get("normalize_rows", 0) != 0, row_beta = get("row_beta", 0);
    is_cautious = get("cautious_decay", 0) != 0;
  }
  double correction(double beta, int64_t t) const {
    return bias_correction ? 1 - std::pow(beta, static_cast<double>(t)) : 1;
  }
  // The largest |m| / sqrt(v) of Adam.
  double largest_direction() const {
    const double single = 1 / std::sqrt(1 - beta2), ratio = beta1 * beta1 / beta2;
    return ratio < 1 ? std::min(single, (1 - beta1) * single / std::sqrt(1 - ratio)) : single;
  }

  double lr, beta1, beta2, eps, decay, min_coeff, max_coeff, coeff_beta, factor_min, factor_max,
      factor_threshold;
  double floor_share;
  int64_t freeze_step, refresh_every;
  bool bias_correction, amsgrad, l2, is_lamb, adapt, compress, by_blocks, exchanges;
  bool is_muon, nesterov, matches_adamw, normalizes_rows, is_cautious;
  double momentum, row_beta;
  int64_t iterations;
  size_t split;
  bool travels_alone = false;  // in a bucket of its own
  bool is_lion = false;        // by name: its options are those of AdamW
};

struct LifecycleParameter {
  LifecycleParameter(LifecycleOptions of_group, size_t its_group, Doubles values)
      : options(std::move(of_group)),
        group(its_group),
        p(std::move(values)),
        m(p.size(), 0),
        v(p.size(), 0),
        largest_v(p.size(), 0) {}

  LifecycleOptions options;
  size_t group;
  size_t rows = 1;  // of what Muon takes for a matrix
  Doubles p, m, v, largest_v, fresh, worker_error, server_error;
  Doubles row_moment;  // Muon's, empty before its first step
  int64_t t = 0;
  bool trained = true;
  double average = 0, averaged = 0, coefficient = 1, factor = 1, scale = 1, floor = 0;
  bool is_new = false;  // no variance at all

  double direction(size_t k, double divisor, bool from_signs) const {
    if (from_signs && v[k] == 0 && !is_new) return 0;
    const double most = options.largest_direction();
    return std::min(std::max(m[k] / divisor, -most), most);
  }
};

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
    for (size_t i = 0; i < parameters.size(); ++i) {
      LifecycleParameter& x = parameters[i];
      if ((frozen && x.options.compress) || !gradients[i] || (is_onebit && !x.trained)) continue;
      x.options.is_lamb   ? lamb(x, *gradients[i])
      : x.options.is_muon ? muon(x, *gradients[i])
      : x.options.is_lion ? lion(x, *gradients[i])
                          : adam(x, *gradients[i]);
    }
    if (is_onebit && !frozen && attempts >= parameters.front().options.freeze_step) freeze();
  }

 private:
  static double squares(const Doubles& values) {
    double sum = 0;
    for (const double x : values) sum += x * x;
    return sum;
  }
  static double clamped(double value, double low, double high) {
    return std::min(std::max(value, low), high);
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

  // Product of (n, k) and (k, m), row by row.
  static Doubles product(const Doubles& a, const Doubles& b, size_t n, size_t k, size_t m) {
    Doubles c(n * m, 0);
    for (size_t i = 0; i < n; ++i) {
      for (size_t l = 0; l < k; ++l) {
        for (size_t j = 0; j < m; ++j) c[i * m + j] += a[i * k + l] * b[l * m + j];
      }
    }
    return c;
  }
  static Doubles transposed(const Doubles& a, size_t n, size_t m) {
    Doubles t(a.size());
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < m; ++j) t[j * n + i] = a[i * m + j];
    }
    return t;
  }
  // K. Jordan's iteration.
  static Doubles orthogonal(Doubles x, size_t n, size_t m, int64_t iterations) {
    const double norm = std::max(std::sqrt(squares(x)), 1e-7);
    for (double& value : x) value /= norm;
    for (int64_t i = 0; i < iterations; ++i) {
      const Doubles gram = product(x, transposed(x, n, m), n, m, n), twice = product(gram, gram, n, n, n);
      Doubles polynomial(gram.size());
      for (size_t k = 0; k < gram.size(); ++k) polynomial[k] = -4.7750 * gram[k] + 2.0315 * twice[k];
      const Doubles added = product(polynomial, x, n, n, m);
      for (size_t k = 0; k < x.size(); ++k) x[k] = 3.4445 * x[k] + added[k];
    }
    return x;
  }

  // NorMuon: rows over the root of their mean square so far, then the norm as it was.
  static void normalize_rows(Doubles& matrix, size_t rows, size_t columns, size_t first,
                             LifecycleParameter& x) {
    x.row_moment.resize(x.rows, 0);
    const double before = std::sqrt(squares(matrix));
    for (size_t r = 0; r < rows; ++r) {
      double square = 0;
      for (size_t c = 0; c < columns; ++c) square += matrix[r * columns + c] * matrix[r * columns + c];
      double& moment = x.row_moment[first + r];
      moment = x.options.row_beta * moment + (1 - x.options.row_beta) * square / static_cast<double>(columns);
      for (size_t c = 0; c < columns; ++c) matrix[r * columns + c] /= std::sqrt(moment) + 1e-10;
    }
    const double after = std::sqrt(squares(matrix));
    for (double& value : matrix) value *= before / (after + 1e-10);
  }

  static void muon(LifecycleParameter& x, const Doubles& g) {
    const LifecycleOptions& o = x.options;
    ++x.t;
    const size_t pieces = o.split, size = x.p.size() / pieces, rows = x.rows / pieces, columns = size / rows;
    const double ratio = static_cast<double>(rows) / static_cast<double>(columns),
                 largest = static_cast<double>(std::max(rows, columns));
    const double adjustment = o.matches_adamw ? 0.2 * std::sqrt(largest) : std::sqrt(std::max(1.0, ratio));
    for (size_t piece = 0; piece < pieces; ++piece) {
      Doubles direction(size);
      for (size_t k = 0; k < size; ++k) {
        double& m = x.m[piece * size + k];
        const double gradient = g[piece * size + k];
        m = o.momentum * m + (1 - o.momentum) * gradient;
        direction[k] = o.nesterov ? (1 - o.momentum) * gradient + o.momentum * m : m;
      }
      direction = orthogonal(std::move(direction), rows, columns, o.iterations);
      if (o.normalizes_rows) normalize_rows(direction, rows, columns, piece * rows, x);
      for (size_t k = 0; k < size; ++k) {
        double& p = x.p[piece * size + k];
        if (!o.is_cautious || direction[k] * p >= 0) p -= o.lr * o.decay * p;
        p -= o.lr * adjustment * direction[k];
      }
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
    round_to_signs(all, values, &LifecycleParameter::worker_error);
    round_to_signs(all, values, &LifecycleParameter::server_error);
    for (size_t j = 0; j < all.size(); ++j) {
      for (double& u : values[j]) u /= all[j]->scale;
    }
  }
  static void round_to_signs(const std::vector<LifecycleParameter*>& all, std::vector<Doubles>& values,
                             Doubles LifecycleParameter::*error) {
    const bool by_blocks = all.front()->options.by_blocks;
    std::vector<double> sums(1, 0), counts(1, 0);
    std::vector<size_t> begins;
    size_t position = 0;
    const auto block_of = [&](size_t j, size_t k) { return by_blocks ? (begins[j] + k) / 2048 : 0; };
    for (size_t j = 0; j < all.size(); ++j) {
      begins.push_back(position);
      for (size_t k = 0; k < values[j].size(); ++k) {
        values[j][k] += (all[j]->*error)[k];
        sums.resize(std::max(sums.size(), block_of(j, k) + 1), 0);
        counts.resize(sums.size(), 0);
        sums[block_of(j, k)] += values[j][k] * values[j][k];
        counts[block_of(j, k)] += 1;
      }
      position += (values[j].size() + 127) / 128 * 128;
    }
    for (size_t j = 0; j < all.size(); ++j) {
      for (size_t k = 0; k < values[j].size(); ++k) {
        const double scale = std::sqrt(sums[block_of(j, k)] / counts[block_of(j, k)]);
        const double sent = values[j][k] < 0 ? -scale : scale;
        (all[j]->*error)[k] = values[j][k] - sent;
        values[j][k] = sent;
      }
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
