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

// m = m + (1 - beta) * (s - m): the running mean of the squares of a row (NorMuon, arXiv:2510.05491), of which s
// is the mean in this step.
template <class Real>
PACER_HOST_DEVICE Real muon_row_moment(Real square, Real one_minus_beta, Real moment) {
  return fma_(one_minus_beta, square - moment, moment);
}

// p -= learning_rate * weight_decay * p, then p -= learning_rate * o: a rule (adam.h) whose gradient
// is o, an element of the orthogonalised matrix. The cautious one leaves the first out where o and p have
// opposite signs (arXiv:2510.12402).
template <bool kIsCautious>
struct MuonUpdate {
  static constexpr bool kFirstMoment = false;
  static constexpr bool kSecondMoment = false;
  static constexpr bool kMaxMoment = false;

  template <class Real>
  PACER_HOST_DEVICE static void step(AdamElement<Real>& e, const AdamScalars<Real>& s) {
    const bool are_opposite = (e.gradient > 0 && e.parameter < 0) || (e.gradient < 0 && e.parameter > 0);
    if (!kIsCautious || !are_opposite) e.parameter = fma_(-s.decay, e.parameter, e.parameter);
    e.parameter = fma_(-s.step_size, e.gradient, e.parameter);
  }
};

}  // namespace pacer::kernels
