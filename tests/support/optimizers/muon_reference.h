// Muon's rule restated in fp64 from K. Jordan's iteration, arXiv:2502.16982, arXiv:2510.05491 (NorMuon) and
// arXiv:2510.12402 (cautious decay), with products of matrices in three loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "support/optimizers/lifecycle_parameter.h"

namespace pacer::testing {

class MuonReference {
 public:
  static void step(LifecycleParameter& x, const Doubles& g) {
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

 private:
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
};

}  // namespace pacer::testing
