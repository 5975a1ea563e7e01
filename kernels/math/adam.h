// The Adam and AdamW update of one element, written once for the host and the device (Kingma & Ba,
// arXiv:1412.6980, algorithm 1; Loshchilov & Hutter, arXiv:1711.05101, algorithm 2), and the step-dependent
// scalars it needs. Loops over elements live in kernels/cpu and kernels/cuda; how an element is stored lives
// in adam_storage.h.
#pragma once

#include <cstdint>

#include <pacer/kernels/math/arithmetic.h>

namespace pacer::kernels {

// Where weight decay enters: not at all, added to the gradient (Adam, L2), or taken from the parameter
// (AdamW).
enum class WeightDecay : uint32_t { none, l2, decoupled };

// What the user chose, as the host knows it. `factor` multiplies every gradient first (1 for none).
struct AdamSettings {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
  double factor = 1;
  uint64_t seed = 0;  // of stochastic rounding
  WeightDecay decay_mode = WeightDecay::none;
  uint32_t bias_correction = 1;
};

// Everything an element update reads besides the element, rounded once from double. Real is float, or double
// for fp64 parameters.
template <class Real>
struct alignas(16) AdamScalars {
  Real beta1;
  Real one_minus_beta1;
  Real beta2;
  Real one_minus_beta2;
  Real epsilon;
  Real factor;
  Real l2;                       // weight_decay in l2 mode, else 0
  Real decay;                    // learning_rate * weight_decay in decoupled mode, else 0
  Real step_size;                // learning_rate / c1
  Real inverse_sqrt_correction;  // 1 / sqrt(c2)
  WeightDecay decay_mode;
  uint32_t skip;  // not zero: change nothing
  uint64_t seed;
  int64_t step;  // t, the step being taken; 1 for the first
};

// c1 = 1 - beta1^t and c2 = 1 - beta2^t, both 1 without bias correction; all in double, each result rounded
// once.
template <class Real>
PACER_HOST_DEVICE AdamScalars<Real> adam_scalars(const AdamSettings& settings, int64_t step) {
  const bool correct = settings.bias_correction != 0;
  const double c1 = correct ? one_minus_power(settings.beta1, step) : 1.0;
  const double c2 = correct ? one_minus_power(settings.beta2, step) : 1.0;
  const bool l2 = settings.decay_mode == WeightDecay::l2;
  const bool decoupled = settings.decay_mode == WeightDecay::decoupled;
  AdamScalars<Real> scalars;
  scalars.beta1 = static_cast<Real>(settings.beta1);
  scalars.one_minus_beta1 = static_cast<Real>(1.0 - settings.beta1);
  scalars.beta2 = static_cast<Real>(settings.beta2);
  scalars.one_minus_beta2 = static_cast<Real>(1.0 - settings.beta2);
  scalars.epsilon = static_cast<Real>(settings.epsilon);
  scalars.factor = static_cast<Real>(settings.factor);
  scalars.l2 = static_cast<Real>(l2 ? settings.weight_decay : 0.0);
  scalars.decay = static_cast<Real>(decoupled ? mul_(settings.learning_rate, settings.weight_decay) : 0.0);
  scalars.step_size = static_cast<Real>(div_(settings.learning_rate, c1));
  scalars.inverse_sqrt_correction = static_cast<Real>(div_(1.0, sqrt_(c2)));
  scalars.decay_mode = settings.decay_mode;
  scalars.skip = 0;
  scalars.seed = settings.seed;
  scalars.step = step;
  return scalars;
}

// The values of one element in registers.
template <class Real>
struct AdamElement {
  Real gradient;
  Real parameter;
  Real exp_avg;         // first moment m
  Real exp_avg_sq;      // second moment v
  Real max_exp_avg_sq;  // running maximum of v (amsgrad), else not read
};

// One step of one element. `decay_mode` is passed beside the scalars so that a loop can make it a constant.
//   l2:         g += weight_decay * p           decoupled:  p -= learning_rate * weight_decay * p
//   m = beta1 * m + (1 - beta1) * g             v = beta2 * v + (1 - beta2) * g^2
//   p -= (learning_rate / c1) * m / (sqrt(v) / sqrt(c2) + epsilon)
// Valid range: finite inputs whose g^2 is finite; outside it IEEE rules apply (an infinite gradient gives
// NaN).
template <class Real, bool kAmsgrad>
PACER_HOST_DEVICE void adam_step(AdamElement<Real>& e, const AdamScalars<Real>& s, WeightDecay decay_mode) {
  Real g = mul_(s.factor, e.gradient);
  if (decay_mode == WeightDecay::l2) g = fma_(s.l2, e.parameter, g);
  if (decay_mode == WeightDecay::decoupled) e.parameter = fma_(-s.decay, e.parameter, e.parameter);
  e.exp_avg = fma_(s.beta1, e.exp_avg, mul_(s.one_minus_beta1, g));
  e.exp_avg_sq = fma_(s.beta2, e.exp_avg_sq, mul_(mul_(s.one_minus_beta2, g), g));
  Real second_moment = e.exp_avg_sq;
  if constexpr (kAmsgrad) {
    e.max_exp_avg_sq = e.max_exp_avg_sq >= second_moment ? e.max_exp_avg_sq : second_moment;
    second_moment = e.max_exp_avg_sq;
  }
  const Real denominator = fma_(sqrt_of_often_zero(second_moment), s.inverse_sqrt_correction, s.epsilon);
  e.parameter = fma_(-s.step_size, div_often_zero(e.exp_avg, denominator), e.parameter);
}

}  // namespace pacer::kernels
