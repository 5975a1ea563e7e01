// Four elements of 1-bit LAMB in a thread's registers: parameters from memory and back, both momenta from
// signs or dense memory, and what a warp has to know of the 128 elements that its lanes share.
#pragma once

#include <cstdint>

#include <pacer/kernels/onebit_lamb.h>
#include <pacer/kernels/cuda/onebit_tiles.cuh>

namespace pacer::kernels {

// Four parameters of a thread, from memory and back.
template <AdamStorage kStorage>
struct LambParameters {
  using Types = StorageOf<kStorage>;
  typename Types::Param parameter[kMine];
  typename Types::Extra extra[Types::kHasExtra ? kMine : 1];

  __device__ static bool in_packets(const OneBitAdamTensor& tensor) {
    return is_packet_aligned<typename Types::Param, kMine>(
               static_cast<const typename Types::Param*>(tensor.parameter)) &&
           (!Types::kHasExtra || is_packet_aligned<typename Types::Extra, kMine>(
                                     static_cast<const typename Types::Extra*>(tensor.master_or_remainder)));
  }
  __device__ __forceinline__ void load(const OneBitAdamTensor& tensor, int64_t offset, int count) {
    load_mine(static_cast<const typename Types::Param*>(tensor.parameter) + offset, count, parameter);
    if constexpr (Types::kHasExtra) {
      load_mine(static_cast<const typename Types::Extra*>(tensor.master_or_remainder) + offset, count, extra);
    }
  }
  // Where in_packets: all four.
  __device__ __forceinline__ void load_packets(const OneBitAdamTensor& tensor, int64_t offset) {
    load_packet(static_cast<const typename Types::Param*>(tensor.parameter) + offset, parameter);
    if constexpr (Types::kHasExtra) {
      load_packet(static_cast<const typename Types::Extra*>(tensor.master_or_remainder) + offset, extra);
    }
  }
  __device__ __forceinline__ float value(int k) const {
    StoredElement<kStorage> e{};
    e.parameter = parameter[k];
    if constexpr (Types::kHasExtra) e.extra = extra[k];
    return load_parameter(e);
  }
  __device__ __forceinline__ void set(int k, float value) {
    StoredElement<kStorage> e{};
    e.parameter = parameter[k];
    if constexpr (Types::kHasExtra) e.extra = extra[k];
    store_parameter(value, 0, e);
    parameter[k] = e.parameter;
    if constexpr (Types::kHasExtra) extra[k] = e.extra;
  }
  __device__ __forceinline__ void store(const OneBitAdamTensor& tensor, int64_t offset, int count) const {
    store_mine(static_cast<typename Types::Param*>(tensor.parameter) + offset, count, parameter);
    if constexpr (Types::kHasExtra) {
      store_mine(static_cast<typename Types::Extra*>(tensor.master_or_remainder) + offset, count, extra);
    }
  }
};

// What a warp has to know of its 128 elements of a row, worked out once. Signs are null where that momentum
// is dense. Where both are signs, the share of a gradient's square has two values only.
struct LambGranule {
  const unsigned char* signs;
  const unsigned char* signs_before;
  float magnitude, magnitude_before;
  float share_same, share_other;
};

__device__ __forceinline__ LambGranule lamb_granule(const OneBitLambWork& work, bool dense, bool dense_before,
                                                    int64_t position, float momentum_scale,
                                                    const MomentScalars<float>& scalars) {
  LambGranule granule{};
  if (!dense) {
    const SignedGranule now = signed_granule(work.now.bits, position);
    granule.signs = now.signs;
    granule.magnitude = div_(now.scale, momentum_scale);
  }
  if (!dense_before) {
    const SignedGranule before = signed_granule(work.bits_before, position);
    granule.signs_before = before.signs;
    granule.magnitude_before = div_(before.scale, momentum_scale);
  }
  granule.share_same = fresh_share(granule.magnitude, granule.magnitude_before, scalars);
  granule.share_other = fresh_share(granule.magnitude, -granule.magnitude_before, scalars);
  return granule;
}

// A thread's four elements of a row, as they come from memory.
template <AdamStorage kStorage, bool kDense>
struct LambRow {
  LambParameters<kStorage> parameters;
  float variance[kMine], fresh[kMine];
  float momentum[kDense ? kMine : 1];
  uint32_t nibble, nibble_before;

  template <bool kWhole>
  __device__ __forceinline__ void load(const OneBitLambWork& work, const OneBitAdamTensor& tensor,
                                       const LambGranule& granule, int64_t offset, int count, int place) {
    const int64_t position = tensor.begin + offset;
    load_packet<float, kMine>(work.now.variance + position, variance);
    load_packet<float, kMine>(work.fresh_variance + position, fresh);
    if constexpr (kWhole) {
      parameters.load_packets(tensor, offset);
    } else {
      parameters.load(tensor, offset, count);
    }
    if constexpr (kDense) {
      load_packet(work.now.dense_momentum + position, momentum);
    } else {
      nibble = nibble_of(granule.signs, place);
    }
    if (granule.signs_before != nullptr) nibble_before = nibble_of(granule.signs_before, place);
  }
  __device__ __forceinline__ float momentum_of(const LambGranule& granule, int k) const {
    if constexpr (kDense) return momentum[k];
    return decode_sign((nibble >> k) & 1u, granule.magnitude);
  }
  __device__ __forceinline__ void advance(const OneBitLambWork& work, const LambGranule& granule, int k,
                                          int64_t position, const MomentScalars<float>& scalars) {
    float share;
    if (!kDense && granule.signs_before != nullptr) {
      share = ((nibble ^ nibble_before) >> k) & 1u ? granule.share_other : granule.share_same;
    } else {
      const float before = granule.signs_before != nullptr
                               ? decode_sign((nibble_before >> k) & 1u, granule.magnitude_before)
                               : work.dense_before[position];
      share = fresh_share(momentum_of(granule, k), before, scalars);
    }
    fresh[k] = fresh_variance(fresh[k], share, scalars);
  }
};

// The larger of both. A quotient is worked out only where one of half the digits says that it may be larger
// than one that somebody has found already.
__device__ __forceinline__ float larger_ratio(float largest, float found, float denominator, float fresh,
                                              const LambScalars<float>& scalars) {
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(fresh));
  const float near = __fdividef(denominator, fma_(root, scalars.inverse_sqrt_correction, scalars.epsilon));
  if (near < found * 0.99999f) return largest;
  const float ratio = denominator_ratio(denominator, fresh, scalars);
  return ratio > largest ? ratio : largest;
}

}  // namespace pacer::kernels
