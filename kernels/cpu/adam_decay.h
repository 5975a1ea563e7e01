// Adam's rule with where weight decay enters as a constant of the loop.
#pragma once

#include <pacer/kernels/math/adam.h>

namespace pacer::kernels {

template <bool kAmsgrad, WeightDecay kDecay>
struct AdamWith : AdamRule<kAmsgrad> {
  template <class Real>
  PACER_HOST_DEVICE static void step(AdamElement<Real>& e, const AdamScalars<Real>& s) {
    adam_step<Real, kAmsgrad>(e, s, kDecay, AnyOperands());
  }
};

// Calls visit(rule) with that rule.
template <bool kAmsgrad, class Visit>
void with_decay(WeightDecay decay, const Visit& visit) {
  switch (decay) {
    case WeightDecay::none:
      return visit(AdamWith<kAmsgrad, WeightDecay::none>{});
    case WeightDecay::l2:
      return visit(AdamWith<kAmsgrad, WeightDecay::l2>{});
    case WeightDecay::decoupled:
      return visit(AdamWith<kAmsgrad, WeightDecay::decoupled>{});
  }
}

}  // namespace pacer::kernels
