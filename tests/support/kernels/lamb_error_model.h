// LAMB restated in arithmetic that carries its own rounding errors: the exact step of a whole tensor, and how
// far a computed one may be from it. From the paper (arXiv:1904.00962, algorithm 2), operation by operation;
// the moments are those of adam_error_model.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/kernels/adam_error_model.h"

namespace pacer::kernels::testing {

constexpr long double kNothingKnown = std::numeric_limits<long double>::infinity();

// A sum of squares of computed numbers. Terms do not cancel, so that every addition on the way costs at most
// half an ULP of the whole sum: 16 in a column, 11 from columns to the unit; then, in double, the units.
template <class Real>
Carried<double> carried_sum_of_squares(const std::vector<Carried<Real>>& terms) {
  Carried<double> sum;
  for (const Carried<Real>& term : terms) {
    const long double x = std::abs(term.value);
    sum.value += x * x;
    sum.bound += (2 * x + term.bound) * term.bound;
    sum.unit += 2 * x * term.unit;  // a scalar that is off is so in all terms
  }
  const auto units = static_cast<long double>(terms.size() / 32768 + 1);
  const long double additions = std::ldexp(16.0L + 11.0L, -std::numeric_limits<Real>::digits) +
                                std::ldexp(units / 256 + 9, -std::numeric_limits<double>::digits);
  const long double underflow =
      static_cast<long double>(2 * terms.size() + 2048) * std::numeric_limits<Real>::denorm_min() / 2;
  const long double reach = sum.value + sum.bound;
  sum.bound += 1.01L * additions * reach + underflow;
  // Squares too small for Real are lost all together: they count as one error.
  sum.unit = std::max({sum.unit, pacer::testing::ulp_of<Real>(sum.value), underflow});
  if (!(1.01L * reach < std::numeric_limits<Real>::max())) sum.bound = kNothingKnown;
  return sum;
}

// Where a norm is exactly 0 the ratio is 1; where it may have been lost to underflow, nothing is known.
inline Carried<double> carried_ratio(const RuleSettings& s, const Carried<double>& parameter_squares,
                                     const Carried<double>& update_squares, bool zero_parameter,
                                     bool zero_update) {
  if (!s.adapt || zero_parameter || zero_update) return exactly<double>(1);
  Carried<double> ratio = square_root(parameter_squares) / square_root(update_squares);
  if (!(parameter_squares.bound < parameter_squares.value) ||
      !(update_squares.bound < update_squares.value) || !std::isfinite(ratio.unit)) {
    ratio.bound = kNothingKnown;
  }
  const long double low = ratio.value - ratio.bound, high = ratio.value + ratio.bound;
  if (high <= s.min_coeff) return exactly<double>(s.min_coeff);
  if (low >= s.max_coeff) return exactly<double>(s.max_coeff);
  ratio.value = std::min(std::max(ratio.value, static_cast<long double>(s.min_coeff)),
                         static_cast<long double>(s.max_coeff));
  return ratio;
}

template <class Real>
struct CarriedLamb {
  std::vector<StateOf<Carried<Real>>> elements;
  Carried<double> ratio;
};

template <class Real>
CarriedLamb<Real> carried_lamb_step(const RuleSettings& settings, int64_t step,
                                    const std::vector<Real>& gradients,
                                    const std::vector<StateOf<Real>>& before) {
  ErrorCase moments{settings, step, false};
  moments.settings.decay_mode = WeightDecay::none;
  const CarriedScalars<Real> s = carried_scalars<Real>(moments);
  const Carried<double> one = exactly<double>(1);
  const Carried<double> c1 = settings.bias_correction ? carried_correction(settings.beta1, step) : one;
  const Carried<Real> inverse_c1 = narrowed<Real>(one / c1);
  const Carried<Real> weight_decay = narrowed<Real>(exactly<double>(settings.weight_decay));

  CarriedLamb<Real> result;
  std::vector<Carried<Real>> parameters, updates;
  bool zero_parameter = true, zero_update = true;
  for (size_t i = 0; i < before.size(); ++i) {
    StateOf<Carried<Real>> e = carried_step(moments, s, Order::kernel, gradients[i], before[i]);
    e.p = exactly<Real>(before[i].p);
    const Carried<Real> direction = e.m / (square_root(e.v) / s.root_of_c2 + s.epsilon);
    updates.push_back(inverse_c1 * direction + weight_decay * e.p);
    parameters.push_back(e.p);
    zero_parameter = zero_parameter && e.p.value == 0;
    zero_update = zero_update && updates.back().value == 0 && e.m.value == 0;
    result.elements.push_back(e);
  }
  result.ratio = carried_ratio(settings, carried_sum_of_squares(parameters), carried_sum_of_squares(updates),
                               zero_parameter, zero_update);
  Carried<Real> step_size = narrowed<Real>(exactly<double>(settings.learning_rate) * result.ratio);
  step_size.unit = std::max(step_size.unit, pacer::testing::ulp_of<Real>(step_size.value));
  for (size_t i = 0; i < before.size(); ++i) {
    result.elements[i].p = parameters[i] - step_size * updates[i];
  }
  return result;
}

}  // namespace pacer::kernels::testing
