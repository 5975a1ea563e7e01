// The LAMB update of one element, written once for the host and the device (You et al., arXiv:1904.00962,
// algorithm 2), the step-dependent scalars it needs, and the trust ratio of a tensor:
//
//   m, v as Adam        u = (m / c1) / (sqrt(v) / sqrt(c2) + epsilon) + weight_decay * p
//   r = clamp(|p| / |u|, min_coeff, max_coeff), 1 where |p| or |u| is 0        p -= learning_rate * r * u
//
// r needs the norms of a whole tensor, so a step is two passes over the elements. Both compute u from the
// moments as they are stored: rounded to bf16 where the dtype set says so, or decoded from their codes in 8 bits.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/adam.h>
#include <pacer/kernels/math/adam_storage.h>

namespace pacer::kernels {

// Everything an element update and a trust ratio read besides elements and norms, rounded once from double.
template <class Real>
struct alignas(16) LambScalars : MomentScalars<Real> {
  Real weight_decay;
  Real inverse_correction;       // 1 / c1
  Real inverse_sqrt_correction;  // 1 / sqrt(c2)
  uint64_t seed;
  int64_t step;  // t, the step being taken; 1 for the first
  double learning_rate;
  double min_coeff;
  double max_coeff;
  double coeff_beta;
};

// All in double, each result rounded once.
template <class Real>
PACER_HOST_DEVICE LambScalars<Real> lamb_scalars(const RuleSettings& settings, int64_t step) {
  const auto [c1, c2] = bias_corrections(settings, step);
  LambScalars<Real> scalars;
  set_moments(settings, scalars);
  scalars.weight_decay = static_cast<Real>(settings.weight_decay);
  scalars.inverse_correction = static_cast<Real>(div_(1.0, c1));
  scalars.inverse_sqrt_correction = static_cast<Real>(div_(1.0, sqrt_(c2)));
  scalars.seed = settings.seed;
  scalars.step = step;
  scalars.learning_rate = settings.learning_rate;
  scalars.min_coeff = settings.min_coeff;
  scalars.max_coeff = settings.max_coeff;
  scalars.coeff_beta = settings.coeff_beta;
  return scalars;
}

// What is squared and added up: the parameter (its master copy where there is one) and its update u.
template <class Real>
struct LambTerms {
  Real parameter;
  Real update;
};

// `direction` is what over_root makes of the moments.
template <class Real>
PACER_HOST_DEVICE LambTerms<Real> lamb_terms(Real parameter, Real direction, const LambScalars<Real>& s) {
  return {parameter, fma_(s.weight_decay, parameter, mul_(s.inverse_correction, direction))};
}
// The update, made of the moments and the parameter as they are stored.
template <AdamStorage kStorage>
PACER_HOST_DEVICE LambTerms<typename StorageOf<kStorage>::Real> lamb_terms(
    const StoredElement<kStorage>& stored, const LambScalars<typename StorageOf<kStorage>::Real>& s) {
  return lamb_terms(load_parameter(stored), over_root(load(stored.exp_avg), load(stored.exp_avg_sq), s), s);
}
// The same of moments that were codes. An element whose second moment is stored as zero has no direction, because its
// first one need not be zero: epsilon alone, which may be 0, would make it enormous.
PACER_HOST_DEVICE LambTerms<float> lamb_terms_of_codes(float parameter, float exp_avg, float exp_avg_sq,
                                                       const LambScalars<float>& s) {
  return lamb_terms(parameter, exp_avg_sq == 0.0f ? 0.0f : over_root(exp_avg, exp_avg_sq, s), s);
}

// First pass: the new moments.
template <AdamStorage kStorage>
PACER_HOST_DEVICE LambTerms<typename StorageOf<kStorage>::Real> lamb_moments(
    StoredElement<kStorage>& stored, const LambScalars<typename StorageOf<kStorage>::Real>& s) {
  auto exp_avg = load(stored.exp_avg), exp_avg_sq = load(stored.exp_avg_sq);
  update_moments(mul_(s.factor, load(stored.gradient)), s, exp_avg, exp_avg_sq);
  store(exp_avg, stored.exp_avg);
  store(exp_avg_sq, stored.exp_avg_sq);
  return lamb_terms(stored, s);
}

// Second pass: the new parameter. `step_size` is that of the tensor's LambRatio.
template <class Real>
PACER_HOST_DEVICE Real lamb_parameter(const LambTerms<Real>& terms, Real step_size) {
  return fma_(-step_size, terms.update, terms.parameter);
}
// The same of a stored element; `random16` as for store_parameter.
template <AdamStorage kStorage>
PACER_HOST_DEVICE void lamb_step(StoredElement<kStorage>& stored,
                                 const LambScalars<typename StorageOf<kStorage>::Real>& s,
                                 typename StorageOf<kStorage>::Real step_size, uint32_t random16) {
  store_parameter(lamb_parameter(lamb_terms(stored, s), step_size), random16, stored);
}

// What lies between the passes, one per tensor.
struct LambRatio {
  double ratio;      // r
  double step_size;  // learning_rate * r, rounded to Real
};

// The exponential mean of a tensor's trust ratios, from 0, and of how many.
struct LambAverage {
  double mean;
  double count;
};

// Whether an update is weight decay and nothing else, to five digits: then |p| / |u| is 1 / weight_decay
// whatever the gradients were, and says nothing of the tensor.
template <class Real>
PACER_HOST_DEVICE bool is_decay_alone(double ratio, const LambScalars<Real>& s) {
  const double off = mul_(ratio, static_cast<double>(s.weight_decay)) - 1.0;
  return off < 1e-5 && off > -1e-5;
}

// The trust ratio, from the sums of squares of a tensor's parameters and of its updates. A NaN among them
// stays NaN. `average`, where there is one, takes the ratio in if neither norm is 0 and the update is not
// decay alone.
template <class Real>
PACER_HOST_DEVICE LambRatio lamb_ratio(double parameter_squares, double update_squares,
                                       const LambScalars<Real>& s, LambAverage* average = nullptr) {
  double ratio = 1;
  if (s.adapt != 0 && parameter_squares != 0 && update_squares != 0) {
    ratio = div_(sqrt_(parameter_squares), sqrt_(update_squares));
    const bool counts = average != nullptr && !is_decay_alone(ratio, s);
    ratio = ratio < s.min_coeff ? s.min_coeff : ratio > s.max_coeff ? s.max_coeff : ratio;
    if (counts) {
      average->mean = mul_(s.coeff_beta, average->mean) + mul_(1.0 - s.coeff_beta, ratio);
      average->count += 1;
    }
  }
  return {ratio, static_cast<double>(static_cast<Real>(mul_(s.learning_rate, ratio)))};
}

}  // namespace pacer::kernels
