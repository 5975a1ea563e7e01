// The element math of Muon (K. Jordan, 2024; "Muon is Scalable for LLM Training", arXiv:2502.16982), on both
// sides of the products that orthogonalise a matrix: momentum in front of them, the update behind.
#pragma once

#include <pacer/kernels/math/adam.h>

namespace pacer::kernels {

// m = m + (1 - momentum) * (g - m), and what is orthogonalised: m, or with Nesterov's momentum
// g + momentum * (m - g). The scalars' beta1 is the momentum.
template <class Real>
PACER_HOST_DEVICE Real muon_direction(Real gradient, bool nesterov, const AdamScalars<Real>& s,
                                      Real& momentum) {
  const Real g = mul_(s.factor, gradient);
  momentum = fma_(s.one_minus_beta1, g - momentum, momentum);
  return nesterov ? fma_(s.one_minus_beta1, g - momentum, momentum) : momentum;
}

// p -= learning_rate * weight_decay * p, then p -= learning_rate * o: a rule (adam.h) whose gradient
// is o, an element of the orthogonalised matrix.
struct MuonUpdate {
  static constexpr bool kFirstMoment = false;
  static constexpr bool kSecondMoment = false;
  static constexpr bool kMaxMoment = false;

  template <class Real>
  PACER_HOST_DEVICE static void step(AdamElement<Real>& e, const AdamScalars<Real>& s) {
    e.parameter = fma_(-s.decay, e.parameter, e.parameter);
    e.parameter = fma_(-s.step_size, e.gradient, e.parameter);
  }
};

}  // namespace pacer::kernels
