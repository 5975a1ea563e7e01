// The dtype sets of the Adam kernels: how parameter, gradient, moments and the optional master copy of one
// element lie in memory, and the step from memory format to registers and back. Shared by the CPU and the
// CUDA loop, so that both agree to the bit. No loops here.
#pragma once

#include <cstdint>
#include <type_traits>

#include <pacer/core/philox.h>
#include <pacer/kernels/math/adam.h>
#include <pacer/kernels/math/half_types.h>
#include <pacer/kernels/math/weight_correction.h>

namespace pacer::kernels {

// Bytes moved per parameter (each stream once): f64 56, f32 28, *_master 30, bf16_remainder 26,
// bf16_correction 24, bf16 14, bf16_stochastic 22; amsgrad adds one state read and written.
enum class AdamStorage : uint32_t {
  f64,              // everything fp64
  f32,              // everything fp32
  bf16_master,      // bf16 parameter and gradient, fp32 master copy and moments
  f16_master,       // fp16 parameter and gradient, fp32 master copy and moments
  bf16_remainder,   // bf16 parameter and gradient, 16 more bits of the master value, fp32 moments
  bf16_correction,  // bf16 parameter and gradient, 8 more bits of the master value, fp32 moments
  bf16,             // everything bf16, rounded to nearest
  bf16_stochastic,  // bf16 parameter (stochastic rounding) and gradient, fp32 moments
};
constexpr int kAdamStorages = 8;

// A master copy that does not exist.
struct Nothing {};

// Param: parameter and gradient in memory; State: moments in memory; Extra: master copy, remainder or correction
// in memory.
template <class RealType, class ParamType, class StateType, class ExtraType>
struct StorageTypes {
  using Real = RealType;
  using Param = ParamType;
  using State = StateType;
  using Extra = ExtraType;
  static constexpr bool kHasExtra = !std::is_same_v<ExtraType, Nothing>;
};

template <AdamStorage kStorage>
struct StorageOf;
template <>
struct StorageOf<AdamStorage::f64> : StorageTypes<double, double, double, Nothing> {};
template <>
struct StorageOf<AdamStorage::f32> : StorageTypes<float, float, float, Nothing> {};
template <>
struct StorageOf<AdamStorage::bf16_master> : StorageTypes<float, BFloat16, float, float> {};
template <>
struct StorageOf<AdamStorage::f16_master> : StorageTypes<float, Float16, float, float> {};
template <>
struct StorageOf<AdamStorage::bf16_remainder> : StorageTypes<float, BFloat16, float, uint16_t> {};
template <>
struct StorageOf<AdamStorage::bf16_correction> : StorageTypes<float, BFloat16, float, int8_t> {};
template <>
struct StorageOf<AdamStorage::bf16> : StorageTypes<float, BFloat16, BFloat16, Nothing> {};
template <>
struct StorageOf<AdamStorage::bf16_stochastic> : StorageTypes<float, BFloat16, float, Nothing> {};

// Calls visit(std::integral_constant<AdamStorage, storage>{}) and returns its result: a run-time choice
// becomes a compile-time one.
template <class Visit>
auto with_storage(AdamStorage storage, const Visit& visit) {
  switch (storage) {
    case AdamStorage::f64:
      return visit(std::integral_constant<AdamStorage, AdamStorage::f64>{});
    case AdamStorage::f32:
      return visit(std::integral_constant<AdamStorage, AdamStorage::f32>{});
    case AdamStorage::bf16_master:
      return visit(std::integral_constant<AdamStorage, AdamStorage::bf16_master>{});
    case AdamStorage::f16_master:
      return visit(std::integral_constant<AdamStorage, AdamStorage::f16_master>{});
    case AdamStorage::bf16_remainder:
      return visit(std::integral_constant<AdamStorage, AdamStorage::bf16_remainder>{});
    case AdamStorage::bf16_correction:
      return visit(std::integral_constant<AdamStorage, AdamStorage::bf16_correction>{});
    case AdamStorage::bf16:
      return visit(std::integral_constant<AdamStorage, AdamStorage::bf16>{});
    case AdamStorage::bf16_stochastic:
      break;
  }
  return visit(std::integral_constant<AdamStorage, AdamStorage::bf16_stochastic>{});
}

// The same for a dtype set whose momentum can be compressed: fp32, or 16 bits with a master copy, a remainder or a
// correction.
template <class Visit>
auto with_compressible(AdamStorage storage, const Visit& visit) {
  switch (storage) {
    case AdamStorage::f16_master:
      return visit(std::integral_constant<AdamStorage, AdamStorage::f16_master>{});
    case AdamStorage::bf16_master:
      return visit(std::integral_constant<AdamStorage, AdamStorage::bf16_master>{});
    case AdamStorage::bf16_remainder:
      return visit(std::integral_constant<AdamStorage, AdamStorage::bf16_remainder>{});
    case AdamStorage::bf16_correction:
      return visit(std::integral_constant<AdamStorage, AdamStorage::bf16_correction>{});
    default:
      return visit(std::integral_constant<AdamStorage, AdamStorage::f32>{});
  }
}

PACER_HOST_DEVICE double load(double value) { return value; }
PACER_HOST_DEVICE float load(float value) { return value; }
PACER_HOST_DEVICE float load(BFloat16 value) { return to_float(value); }
PACER_HOST_DEVICE float load(Float16 value) { return to_float(value); }

PACER_HOST_DEVICE void store(double value, double& memory) { memory = value; }
PACER_HOST_DEVICE void store(float value, float& memory) { memory = value; }
PACER_HOST_DEVICE void store(float value, BFloat16& memory) { memory = to_bfloat16(value); }
PACER_HOST_DEVICE void store(float value, Float16& memory) { memory = to_float16(value); }

// One element as it lies in memory. Extra and max_exp_avg_sq are ignored where the dtype set or mode has
// none.
template <AdamStorage kStorage>
struct StoredElement {
  using Types = StorageOf<kStorage>;
  typename Types::Param gradient;
  typename Types::Param parameter;
  typename Types::State exp_avg;
  typename Types::State exp_avg_sq;
  typename Types::State max_exp_avg_sq;
  typename Types::Extra extra;
};

PACER_HOST_DEVICE bool same_bits(BFloat16 a, BFloat16 b) { return a.bits == b.bits; }
PACER_HOST_DEVICE bool same_bits(Float16 a, Float16 b) { return a.bits == b.bits; }

// The parameter's exact value: the master copy where there is one, as long as it rounds to the parameter.
// Where it does not, somebody else has written to the parameter, and the parameter wins. Reading it costs 2
// bytes an element; no other way notices writes through Tensor::data(), which count no version.
template <AdamStorage kStorage>
PACER_HOST_DEVICE typename StorageOf<kStorage>::Real load_parameter(const StoredElement<kStorage>& stored) {
  if constexpr (kStorage == AdamStorage::bf16_remainder) {
    return join(stored.parameter, stored.extra);
  } else if constexpr (kStorage == AdamStorage::bf16_correction) {
    return join_24(stored.parameter, stored.extra);
  } else if constexpr (StorageOf<kStorage>::kHasExtra) {
    typename StorageOf<kStorage>::Param rounded;
    store(stored.extra, rounded);
    return same_bits(rounded, stored.parameter) ? stored.extra : load(stored.parameter);
  } else {
    return load(stored.parameter);
  }
}

// `random16`: 16 uniformly random bits, read only by bf16_stochastic.
template <AdamStorage kStorage>
PACER_HOST_DEVICE void store_parameter(typename StorageOf<kStorage>::Real value, uint32_t random16,
                                       StoredElement<kStorage>& stored) {
  if constexpr (kStorage == AdamStorage::bf16_remainder) {
    const BFloat16AndRemainder both = split(value);
    stored.parameter = both.rounded;
    stored.extra = both.remainder;
  } else if constexpr (kStorage == AdamStorage::bf16_correction) {
    const BFloat16AndCorrection both = split_24(value);
    stored.parameter = both.rounded;
    stored.extra = both.correction;
  } else if constexpr (kStorage == AdamStorage::bf16_stochastic) {
    stored.parameter = to_bfloat16_stochastic(value, random16);
  } else {
    if constexpr (StorageOf<kStorage>::kHasExtra) stored.extra = value;
    store(value, stored.parameter);
  }
}

// One step of one stored element by a rule (adam.h): to registers, the rule, and back. `random16` as for
// store_parameter.
template <class Rule, AdamStorage kStorage>
PACER_HOST_DEVICE void step_stored(StoredElement<kStorage>& stored,
                                   const AdamScalars<typename StorageOf<kStorage>::Real>& scalars,
                                   uint32_t random16) {
  AdamElement<typename StorageOf<kStorage>::Real> e;
  e.gradient = load(stored.gradient);
  e.parameter = load_parameter(stored);
  if constexpr (kHasFirstMoment<Rule>) e.exp_avg = load(stored.exp_avg);
  if constexpr (Rule::kSecondMoment) e.exp_avg_sq = load(stored.exp_avg_sq);
  if constexpr (Rule::kMaxMoment) e.max_exp_avg_sq = load(stored.max_exp_avg_sq);

  Rule::step(e, scalars);

  store_parameter(e.parameter, random16, stored);
  if constexpr (kHasFirstMoment<Rule>) store(e.exp_avg, stored.exp_avg);
  if constexpr (Rule::kSecondMoment) store(e.exp_avg_sq, stored.exp_avg_sq);
  if constexpr (Rule::kMaxMoment) store(e.max_exp_avg_sq, stored.max_exp_avg_sq);
}

// Stochastic rounding draws 8 x 16 bits at once: element i takes half-word i % 8 (low half of word 0 first)
// of the draw with index i / 8, i counting real elements in registration order.
constexpr int64_t kElementsPerDraw = 8;

PACER_HOST_DEVICE PhiloxCounter rounding_draw(uint64_t seed, int64_t step, int64_t draw_index) {
  return philox4x32_10(philox_key(seed),
                       philox_counter(static_cast<uint64_t>(draw_index), static_cast<uint64_t>(step), 0,
                                      RandomStream::stochastic_rounding));
}

}  // namespace pacer::kernels
