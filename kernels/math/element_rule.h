// One step of one stored element, whatever the rule: from memory format to registers, the rule, and back. A
// rule that needs nothing but the element and the scalars of its step is a struct with these members:
//
//   static constexpr bool kSecondMoment;  // it has exp_avg_sq
//   static constexpr bool kMaxMoment;     // it has max_exp_avg_sq
//   template <class Real>                 // changes parameter and moments; float, or double for fp64
//   PACER_HOST_DEVICE static void step(AdamElement<Real>& element, const AdamScalars<Real>& scalars);
//
// The loops are cpu/element_loop.h and cuda/element_loop.cuh.
#pragma once

#include <pacer/kernels/math/adam.h>
#include <pacer/kernels/math/adam_storage.h>

namespace pacer::kernels {

// `random16` as for store_parameter.
template <class Rule, AdamStorage kStorage>
PACER_HOST_DEVICE void step_stored(StoredElement<kStorage>& stored,
                                   const AdamScalars<typename StorageOf<kStorage>::Real>& scalars,
                                   uint32_t random16) {
  AdamElement<typename StorageOf<kStorage>::Real> e;
  e.gradient = load(stored.gradient);
  e.parameter = load_parameter(stored);
  e.exp_avg = load(stored.exp_avg);
  if constexpr (Rule::kSecondMoment) e.exp_avg_sq = load(stored.exp_avg_sq);
  if constexpr (Rule::kMaxMoment) e.max_exp_avg_sq = load(stored.max_exp_avg_sq);

  Rule::step(e, scalars);

  store_parameter(e.parameter, random16, stored);
  store(e.exp_avg, stored.exp_avg);
  if constexpr (Rule::kSecondMoment) store(e.exp_avg_sq, stored.exp_avg_sq);
  if constexpr (Rule::kMaxMoment) store(e.max_exp_avg_sq, stored.max_exp_avg_sq);
}

}  // namespace pacer::kernels
