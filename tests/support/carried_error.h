// Arithmetic that carries its own rounding errors (running error analysis: Wilkinson
// 1986; Higham, "Accuracy and Stability of Numerical Algorithms", section 3.3). A formula
// written in Carried<Real> states three things about the same formula computed in Real:
// its exact value, a proven bound of the error, and the size of one unit of error.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace pacer::testing {

template <class Real>
struct Carried {
  // Without the roundings of Real; long double adds errors of
  // its own, 2^-11 of those of double, which `bound` counts.
  long double value = 0;
  // The computed number is at most this far away. Infinite where nothing can be said: the exact number or one
  // within reach of the computed one is beyond the range of Real, or zero where it is divided by.
  long double bound = 0;
  // The largest effect that a change of one ULP of the largest term of any one operation so far has on the
  // value. After a cancellation it is far larger than one ULP of the value. Infinite where a divisor may be
  // so far off that effects are no longer proportional.
  long double unit = 0;
};

// One ULP of Real at this magnitude, as if the exponent had no upper end. By the bits of a double: it is
// called for every operation, and ilogb and ldexp would take most of the time.
template <class Real>
long double ulp_of(long double value) {
  constexpr int kDigits = std::numeric_limits<Real>::digits;
  constexpr int kLowest = std::numeric_limits<Real>::min_exponent - kDigits;
  const double narrow = static_cast<double>(value);
  uint64_t bits;
  std::memcpy(&bits, &narrow, sizeof bits);
  const int exponent = static_cast<int>(bits >> 52 & 0x7FF) - 1023;
  const int of_ulp = std::max(exponent + 1 - kDigits, kLowest);
  if (of_ulp < -1022) return std::ldexp(1.0L, of_ulp);
  bits = static_cast<uint64_t>(of_ulp + 1023) << 52;
  double ulp;
  std::memcpy(&ulp, &bits, sizeof ulp);
  return ulp;
}

// One rounding of `exact`, whose operands bring in `error` and `unit`; `largest` is the largest term.
template <class Real>
Carried<Real> rounded_once(long double exact, long double error, long double unit, long double largest) {
  const long double relative = std::ldexp(1.0L, -std::numeric_limits<Real>::digits) + 0x1p-62L;
  const long double underflow = std::numeric_limits<Real>::denorm_min() / 2.0L;
  const long double reach = std::abs(exact) + error;
  Carried<Real> result{exact, error + relative * reach + underflow, std::max(unit, ulp_of<Real>(largest))};
  if (!(reach * (1 + relative) < std::numeric_limits<Real>::max())) {
    result.bound = std::numeric_limits<long double>::infinity();
  }
  return result;
}

template <class Real>
Carried<Real> exactly(long double value) {
  return {value, 0, 0};
}

// The same number once more rounded, to a narrower type.
template <class Real, class Wide>
Carried<Real> narrowed(const Carried<Wide>& a) {
  Carried<Real> result = rounded_once<Real>(a.value, a.bound, a.unit, 0);
  if (std::is_same_v<Real, Wide>) result.bound = a.bound;
  result.unit = a.unit;  // the rounding of a constant counts as one of the ULPs of the operation that uses it
  return result;
}

template <class Real>
Carried<Real> operator+(const Carried<Real>& a, const Carried<Real>& b) {
  return rounded_once<Real>(a.value + b.value, a.bound + b.bound, std::max(a.unit, b.unit),
                            std::max(std::abs(a.value), std::abs(b.value)));
}

template <class Real>
Carried<Real> operator-(const Carried<Real>& a) {
  return {-a.value, a.bound, a.unit};
}

template <class Real>
Carried<Real> operator-(const Carried<Real>& a, const Carried<Real>& b) {
  return a + -b;
}

template <class Real>
Carried<Real> operator*(const Carried<Real>& a, const Carried<Real>& b) {
  const long double product = a.value * b.value;
  const long double x = std::abs(a.value), y = std::abs(b.value);
  return rounded_once<Real>(product, x * b.bound + y * a.bound + a.bound * b.bound,
                            std::max(x * b.unit, y * a.unit) + a.unit * b.unit, product);
}

template <class Real>
Carried<Real> operator/(const Carried<Real>& a, const Carried<Real>& b) {
  const long double quotient = a.value / b.value;
  const long double y = std::abs(b.value);
  const auto effect = [&](long double of_a, long double of_b) {
    return of_b < y ? (of_a + std::abs(quotient) * of_b) / (y - of_b)
                    : std::numeric_limits<long double>::infinity();
  };
  const long double unit = b.unit < y / 64 ? std::max(effect(a.unit, 0), effect(0, b.unit)) : effect(0, y);
  return rounded_once<Real>(quotient, effect(a.bound, b.bound), unit, quotient);
}

// Of a number that is not negative.
template <class Real>
Carried<Real> square_root(const Carried<Real>& a) {
  const long double root = std::sqrt(a.value);
  const auto effect = [&](long double change) { return root - std::sqrt(std::max(a.value - change, 0.0L)); };
  const auto from_zero = [&](long double change) {
    return a.value == 0 ? std::sqrt(change) : effect(change);
  };
  return rounded_once<Real>(root, from_zero(a.bound), from_zero(a.unit), root);
}

template <class Real>
Carried<Real> larger(const Carried<Real>& a, const Carried<Real>& b) {
  return {std::max(a.value, b.value), std::max(a.bound, b.bound), std::max(a.unit, b.unit)};
}

}  // namespace pacer::testing
