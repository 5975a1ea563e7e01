// Muon's rule restated in fp64 from K. Jordan's iteration, arXiv:2502.16982, arXiv:2510.05491 (NorMuon) and
// arXiv:2510.12402 (cautious decay), with products of matrices in three loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "support/optimizers/lifecycle_parameter.h"

namespace pacer::testing {

class MuonReference {
 public:
  static void step(LifecycleParameter& x, const Doubles& g) {
    update(x, orthogonal_pieces(x, look_ahead(x, g)));
  }

  // OneBitMuon of a single rank that rounds to signs all the same: what it brings and what it gets, of all
  // matrices together. One without a gradient has one of zeros; one that is not trained brings nothing.
  static void step_together(const std::vector<LifecycleParameter*>& matrices,
                            const std::vector<std::optional<Doubles>>& gradients) {
    std::vector<Doubles> values;
    for (size_t i = 0; i < matrices.size(); ++i) {
      LifecycleParameter& x = *matrices[i];
      x.worker_error.resize(x.p.size(), 0), x.server_error.resize(x.p.size(), 0);
      values.emplace_back(x.p.size(), 0);
      if (!x.trained) continue;
      values.back() = orthogonal_pieces(x, look_ahead(x, gradients[i].value_or(values.back())));
      for (double& value : values.back()) value *= std::sqrt(longest_side(x));
    }
    round_to_signs(matrices, values, &LifecycleParameter::worker_error, /*alignment=*/1);
    round_to_signs(matrices, values, &LifecycleParameter::server_error, /*alignment=*/1);
    for (size_t i = 0; i < matrices.size(); ++i) {
      if (matrices[i]->trained) update(*matrices[i], orthogonal_pieces(*matrices[i], values[i]));
    }
  }

 private:
  static size_t piece_rows(const LifecycleParameter& x) { return x.rows / x.options.split; }
  static size_t columns(const LifecycleParameter& x) { return x.p.size() / x.rows; }
  static double longest_side(const LifecycleParameter& x) {
    return static_cast<double>(std::max(piece_rows(x), columns(x)));
  }

  // The new momentum, with the gradient where it is Nesterov's.
  static Doubles look_ahead(LifecycleParameter& x, const Doubles& g) {
    const LifecycleOptions& o = x.options;
    ++x.t;
    Doubles u(g.size());
    for (size_t k = 0; k < g.size(); ++k) {
      x.m[k] = o.momentum * x.m[k] + (1 - o.momentum) * g[k];
      u[k] = o.nesterov ? (1 - o.momentum) * g[k] + o.momentum * x.m[k] : x.m[k];
    }
    return u;
  }

  static Doubles orthogonal_pieces(const LifecycleParameter& x, Doubles values) {
    const size_t size = piece_rows(x) * columns(x);
    for (size_t first = 0; first < values.size(); first += size) {
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first),
                 end = begin + static_cast<std::ptrdiff_t>(size);
      const Doubles made = orthogonal(Doubles(begin, end), piece_rows(x), columns(x), x.options.iterations);
      std::copy(made.begin(), made.end(), begin);
    }
    return values;
  }

  static void update(LifecycleParameter& x, Doubles direction) {
    const LifecycleOptions& o = x.options;
    const double ratio = static_cast<double>(piece_rows(x)) / static_cast<double>(columns(x));
    const double adjustment =
        o.matches_adamw ? 0.2 * std::sqrt(longest_side(x)) : std::sqrt(std::max(1.0, ratio));
    if (o.normalizes_rows) normalize_rows(direction, x);
    for (size_t k = 0; k < x.p.size(); ++k) {
      if (!o.is_cautious || direction[k] * x.p[k] >= 0) x.p[k] -= o.lr * o.decay * x.p[k];
      x.p[k] -= o.lr * adjustment * direction[k];
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

  // NorMuon: in each piece rows over the root of their mean square so far, then the norm as it was.
  static void normalize_rows(Doubles& values, LifecycleParameter& x) {
    x.row_moment.resize(x.rows, 0);
    const size_t rows = piece_rows(x), across = columns(x);
    for (size_t first = 0; first < x.rows; first += rows) {
      double before = 0, after = 0;
      for (size_t r = first; r < first + rows; ++r) {
        double square = 0;
        for (size_t c = 0; c < across; ++c) square += values[r * across + c] * values[r * across + c];
        double& moment = x.row_moment[r];
        moment =
            x.options.row_beta * moment + (1 - x.options.row_beta) * square / static_cast<double>(across);
        const double root = std::sqrt(moment) + 1e-10;
        for (size_t c = 0; c < across; ++c) values[r * across + c] /= root;
        before += square, after += square / (root * root);
      }
      for (size_t k = first * across; k < (first + rows) * across; ++k) {
        values[k] *= std::sqrt(before) / (std::sqrt(after) + 1e-10);
      }
    }
  }
};

}  // namespace pacer::testing
