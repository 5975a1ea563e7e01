// The Adam and AdamW update of one element, written once for the host and the device (Kingma & Ba,
// arXiv:1412.6980, algorithm 1; Loshchilov & Hutter, arXiv:1711.05101, algorithm 2), and the step-dependent
// scalars it needs. Loops over elements live in kernels/cpu and kernels/cuda; how an element is stored lives
// in adam_storage.h.
#pragma once

#include <cstdint>
#include <tuple>
#include <type_traits>

#include <pacer/kernels/math/arithmetic.h>

namespace pacer::kernels {

// Where weight decay enters: not at all, added to the gradient (Adam, L2), or taken from the parameter
// (AdamW).
enum class WeightDecay : uint32_t { none, l2, decoupled };

// Which rule turns the moments into an update: this file's, or that of lamb.h or schedule_free.h.
enum class UpdateRule : uint32_t { adam, lamb, schedule_free };

// How schedule_free.h averages what the steps leave.
struct AveragingRule {
  int64_t warmup_steps = 0;    // the learning rate rises linearly over so many steps, >= 0
  double r = 0;                // a step counts in the average as step^r, in [0, 16],
  double weight_lr_power = 2;  // times the largest learning rate so far to this power, in [0, 16]
};
inline bool operator==(const AveragingRule& a, const AveragingRule& b) {
  return a.warmup_steps == b.warmup_steps && a.r == b.r && a.weight_lr_power == b.weight_lr_power;
}

// What the average has taken in so far; of no step, and in other rules, both are 0.
struct AverageWeights {
  double weight_sum = 0;
  double lr_max = 0;
};
inline bool operator==(const AverageWeights& a, const AverageWeights& b) {
  return a.weight_sum == b.weight_sum && a.lr_max == b.lr_max;
}

// What the user chose for the rule of an update, as the host knows it. `factor` multiplies every gradient
// first (1 for none).
struct RuleSettings {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
  double factor = 1;
  uint64_t seed = 0;  // of stochastic rounding
  WeightDecay decay_mode = WeightDecay::none;
  uint32_t bias_correction = 1;
  // LAMB only, which takes weight_decay whatever decay_mode says.
  double min_coeff = 0.01;  // of the trust ratio
  double max_coeff = 10;
  double coeff_beta = 0;  // of the trust ratio's average
  uint32_t adapt = 1;     // 0: the trust ratio is 1
  UpdateRule rule = UpdateRule::adam;
  AveragingRule averaging;  // schedule_free.h only
};
inline bool operator==(const RuleSettings& a, const RuleSettings& b) {
  const auto all = [](const RuleSettings& s) {
    return std::tie(s.learning_rate, s.beta1, s.beta2, s.epsilon, s.weight_decay, s.factor, s.seed,
                    s.decay_mode, s.bias_correction, s.min_coeff, s.max_coeff, s.coeff_beta, s.adapt, s.rule);
  };
  return all(a) == all(b) && a.averaging == b.averaging;
}

// What every rule's moments and denominators need, rounded once from double. Real is float, or double for
// fp64 parameters.
template <class Real>
struct MomentScalars {
  Real beta1;
  Real one_minus_beta1;
  Real beta2;
  Real one_minus_beta2;
  Real epsilon;
  Real factor;
  uint32_t skip;   // not zero: change nothing
  uint32_t adapt;  // LAMB only. 0: the trust ratio is 1
};
template <class Real>
PACER_HOST_DEVICE void set_moments(const RuleSettings& settings, MomentScalars<Real>& scalars) {
  scalars.beta1 = static_cast<Real>(settings.beta1);
  scalars.one_minus_beta1 = static_cast<Real>(1.0 - settings.beta1);
  scalars.beta2 = static_cast<Real>(settings.beta2);
  scalars.one_minus_beta2 = static_cast<Real>(1.0 - settings.beta2);
  scalars.epsilon = static_cast<Real>(settings.epsilon);
  scalars.factor = static_cast<Real>(settings.factor);
  scalars.skip = 0;
  scalars.adapt = settings.adapt;
}

// Everything an element update reads besides the element, rounded once from double.
template <class Real>
struct alignas(16) AdamScalars : MomentScalars<Real> {
  Real l2;                       // weight_decay in l2 mode, else 0
  Real decay;                    // learning_rate * weight_decay in decoupled mode, else 0
  Real step_size;                // learning_rate / c1
  Real inverse_sqrt_correction;  // 1 / sqrt(c2)
  Real average_weight;           // schedule_free.h alone, as is y_step; 0 in other rules
  Real y_step;
  WeightDecay decay_mode;
  uint64_t seed;
  int64_t step;  // t, the step being taken; 1 for the first
};

// c1 = 1 - beta1^t and c2 = 1 - beta2^t, both 1 without bias correction.
struct BiasCorrections {
  double c1;
  double c2;
};
PACER_HOST_DEVICE BiasCorrections bias_corrections(const RuleSettings& settings, int64_t step) {
  if (settings.bias_correction == 0) return {1.0, 1.0};
  return {one_minus_power(settings.beta1, step), one_minus_power(settings.beta2, step)};
}

// All in double, each result rounded once.
template <class Real>
PACER_HOST_DEVICE AdamScalars<Real> adam_scalars(const RuleSettings& settings, int64_t step) {
  const auto [c1, c2] = bias_corrections(settings, step);
  const bool l2 = settings.decay_mode == WeightDecay::l2;
  const bool decoupled = settings.decay_mode == WeightDecay::decoupled;
  AdamScalars<Real> scalars;
  set_moments(settings, scalars);
  scalars.l2 = static_cast<Real>(l2 ? settings.weight_decay : 0.0);
  scalars.decay = static_cast<Real>(decoupled ? mul_(settings.learning_rate, settings.weight_decay) : 0.0);
  scalars.step_size = static_cast<Real>(div_(settings.learning_rate, c1));
  scalars.inverse_sqrt_correction = static_cast<Real>(div_(1.0, sqrt_(c2)));
  scalars.average_weight = 0;
  scalars.y_step = 0;
  scalars.decay_mode = settings.decay_mode;
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

// m = beta1 * m + (1 - beta1) * g             v = beta2 * v + (1 - beta2) * g^2
template <class Real, class Scalars>
PACER_HOST_DEVICE void update_moments(Real g, const Scalars& s, Real& exp_avg, Real& exp_avg_sq) {
  exp_avg = fma_(s.beta1, exp_avg, mul_(s.one_minus_beta1, g));
  exp_avg_sq = fma_(s.beta2, exp_avg_sq, mul_(mul_(s.one_minus_beta2, g), g));
}

// m / (sqrt(v) / sqrt(c2) + epsilon). `operations` takes the root and the quotient, here and below.
template <class Real, class Scalars, class Operations>
PACER_HOST_DEVICE Real over_root(Real exp_avg, Real second_moment, const Scalars& s,
                                 Operations&& operations) {
  const Real denominator = fma_(operations.root(second_moment), s.inverse_sqrt_correction, s.epsilon);
  return operations.quotient(exp_avg, denominator);
}
template <class Real, class Scalars>
PACER_HOST_DEVICE Real over_root(Real exp_avg, Real second_moment, const Scalars& s) {
  return over_root(exp_avg, second_moment, s, AnyOperands());
}

// Whether the denominator is within 2^-60 and 2^31 for every root up to 2^15.
template <class Scalars>
PACER_HOST_DEVICE bool has_ordinary_denominators(const Scalars& s) {
  return s.epsilon >= 0x1p-60f && s.epsilon <= 0x1p30f && s.inverse_sqrt_correction >= 0 &&
         s.inverse_sqrt_correction <= 0x1p15f;
}

// One step of one element. `decay_mode` is passed beside the scalars so that a loop can make it a constant.
//   l2:         g += weight_decay * p           decoupled:  p -= learning_rate * weight_decay * p
//   m = beta1 * m + (1 - beta1) * g             v = beta2 * v + (1 - beta2) * g^2
//   p -= (learning_rate / c1) * m / (sqrt(v) / sqrt(c2) + epsilon)
// Valid range: finite inputs whose g^2 is finite; outside it IEEE rules apply (an infinite gradient gives
// NaN).
template <class Real, bool kAmsgrad, class Operations>
PACER_HOST_DEVICE void adam_step(AdamElement<Real>& e, const AdamScalars<Real>& s, WeightDecay decay_mode,
                                 Operations&& operations) {
  Real g = mul_(s.factor, e.gradient);
  if (decay_mode == WeightDecay::l2) g = fma_(s.l2, e.parameter, g);
  if (decay_mode == WeightDecay::decoupled) e.parameter = fma_(-s.decay, e.parameter, e.parameter);
  update_moments(g, s, e.exp_avg, e.exp_avg_sq);
  Real second_moment = e.exp_avg_sq;
  if constexpr (kAmsgrad) {
    e.max_exp_avg_sq = e.max_exp_avg_sq >= second_moment ? e.max_exp_avg_sq : second_moment;
    second_moment = e.max_exp_avg_sq;
  }
  e.parameter = fma_(-s.step_size, over_root(e.exp_avg, second_moment, s, operations), e.parameter);
}

// The same as a rule. A rule that needs nothing but the element and the scalars of its step is a struct with
// these members; the loops over it are cpu/element_loop.h and cuda/element_loop.cuh:
//
//   static constexpr bool kFirstMoment;   // it has exp_avg; may be left out where that is true
//   static constexpr bool kSecondMoment;  // it has exp_avg_sq
//   static constexpr bool kMaxMoment;     // it has max_exp_avg_sq
//   template <class Real>                 // changes parameter and moments; float, or double for fp64
//   PACER_HOST_DEVICE static void step(AdamElement<Real>& element, const AdamScalars<Real>& scalars);
//
// For cuda/coded_loop.cuh a step also takes `operations`.
template <bool kAmsgrad>
struct AdamRule {
  static constexpr bool kSecondMoment = true;
  static constexpr bool kMaxMoment = kAmsgrad;

  template <class Real, class Operations = AnyOperands>
  PACER_HOST_DEVICE static void step(AdamElement<Real>& e, const AdamScalars<Real>& s,
                                     Operations&& operations = Operations()) {
    adam_step<Real, kAmsgrad>(e, s, s.decay_mode, operations);
  }
};

// Whether a rule has a first moment.
template <class Rule, class = void>
struct HasFirstMoment : std::true_type {};
template <class Rule>
struct HasFirstMoment<Rule, std::void_t<decltype(Rule::kFirstMoment)>>
    : std::bool_constant<Rule::kFirstMoment> {};
template <class Rule>
constexpr bool kHasFirstMoment = HasFirstMoment<Rule>::value;

}  // namespace pacer::kernels
