// Adam and AdamW restated in arithmetic that carries its own rounding errors: the
// exact step of one element, and how far a computed one may be from it. Written from
// the formulas of the papers (arXiv:1412.6980, 1711.05101), operation by operation and
// without any fused one; a fused operation rounds less, so the bound holds for it too.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <pacer/kernels/math/adam.h>

#include "support/carried_error.h"

namespace pacer::kernels::testing {

using pacer::testing::Carried;
using pacer::testing::exactly;
using pacer::testing::larger;
using pacer::testing::narrowed;
using pacer::testing::square_root;

// Orders of operations, which round differently: torch decays by p * (1 - lr * wd) and divides (lr / c1) * m.
enum class Order { kernel, torch };

struct ErrorCase {
  RuleSettings settings;
  int64_t step = 1;
  bool amsgrad = false;
};

template <class Real>
struct CarriedScalars {
  Carried<Real> beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon, factor, decay, keep, step_size,
      root_of_c2;
};

// 1 - beta^t in double, right to two units of 2^-53 (tests/unit/kernels/arithmetic.cpp).
inline Carried<double> carried_correction(double beta, int64_t t) {
  Carried<double> correction =
      exactly<double>(-std::expm1(static_cast<long double>(t) * std::log(static_cast<long double>(beta))));
  correction.bound = 0x1p-52L * correction.value;
  correction.unit = pacer::testing::ulp_of<double>(correction.value);
  return correction;
}

template <class Real>
CarriedScalars<Real> carried_scalars(const ErrorCase& c) {
  const RuleSettings& s = c.settings;
  using Wide = Carried<double>;
  const Wide one = exactly<double>(1), lr = exactly<double>(s.learning_rate);
  const Wide c1 = s.bias_correction ? carried_correction(s.beta1, c.step) : one;
  const Wide c2 = s.bias_correction ? carried_correction(s.beta2, c.step) : one;
  const Wide beta1 = exactly<double>(s.beta1), beta2 = exactly<double>(s.beta2);
  const Wide weight_decay = exactly<double>(s.weight_decay);
  const bool decoupled = s.decay_mode == WeightDecay::decoupled;
  CarriedScalars<Real> scalars;
  scalars.beta1 = narrowed<Real>(beta1);
  scalars.one_minus_beta1 = narrowed<Real>(one - beta1);
  scalars.beta2 = narrowed<Real>(beta2);
  scalars.one_minus_beta2 = narrowed<Real>(one - beta2);
  scalars.epsilon = narrowed<Real>(exactly<double>(s.epsilon));
  scalars.factor = narrowed<Real>(exactly<double>(s.factor));
  scalars.decay = narrowed<Real>(decoupled ? lr * weight_decay : weight_decay);
  scalars.keep = narrowed<Real>(one - lr * weight_decay);
  scalars.step_size = narrowed<Real>(lr / c1);
  scalars.root_of_c2 = narrowed<Real>(square_root(c2));
  return scalars;
}

template <class Real>
struct StateOf {
  Real m, v, largest_v, p;
};

template <class Real>
StateOf<Carried<Real>> carried_step(const ErrorCase& c, const CarriedScalars<Real>& s, Order order,
                                    Real gradient, const StateOf<Real>& before) {
  StateOf<Carried<Real>> e{exactly<Real>(before.m), exactly<Real>(before.v), exactly<Real>(before.largest_v),
                           exactly<Real>(before.p)};
  Carried<Real> g = s.factor * exactly<Real>(gradient);
  if (c.settings.decay_mode == WeightDecay::l2) g = g + s.decay * e.p;
  if (c.settings.decay_mode == WeightDecay::decoupled) {
    e.p = order == Order::kernel ? e.p - s.decay * e.p : e.p * s.keep;
  }
  e.m = s.beta1 * e.m + s.one_minus_beta1 * g;
  Carried<Real> square = s.one_minus_beta2 * g * g;
  square.unit =
      std::max(square.unit, 2 * std::abs(s.one_minus_beta2.value * g.value) * g.unit);  // one g, twice
  e.v = s.beta2 * e.v + square;
  if (c.amsgrad) e.largest_v = larger(e.largest_v, e.v);
  const Carried<Real> denominator = square_root(c.amsgrad ? e.largest_v : e.v) / s.root_of_c2 + s.epsilon;
  e.p = e.p - (order == Order::kernel ? s.step_size * (e.m / denominator) : s.step_size * e.m / denominator);
  return e;
}

}  // namespace pacer::kernels::testing
