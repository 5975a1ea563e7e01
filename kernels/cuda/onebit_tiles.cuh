// Tiles of the 1-bit optimizers on the device: four elements a thread, momentum from bits or dense memory.
#pragma once

#include <cstdint>

#include <pacer/kernels/onebit_adam.h>
#include <pacer/kernels/cuda/onebit_compress.cuh>
#include <pacer/kernels/cuda/packet.cuh>

namespace pacer::kernels {

__device__ __forceinline__ bool momentum_is_dense(const OneBitAdamWork& work, const OneBitControl& control) {
  return work.dense_momentum != nullptr && (control.status == nullptr || control.status->has_mean == 0);
}

constexpr int kTileThreads = 128;  // of a block
static_assert(kTileThreads * kMine == kOneBitBlockTile && kWarp * kMine == kOneBitWarpTile);

__device__ __forceinline__ float momentum_scale_of(const OneBitAdamWork& work, uint32_t tensor) {
  return work.momentum_scales == nullptr ? 1.0f : work.momentum_scales[tensor];
}

// Signs of a lane's four elements: granules begin where tensors and tiles do.
struct MySigns {
  uint32_t nibble;
  float scale;
};
__device__ __forceinline__ MySigns load_signs(const OneBitMessages& bits, int64_t position, int lane) {
  const int place = lane % kWarp;
  const SignedGranule granule = signed_granule(bits, position - place * kMine);
  return {nibble_of(granule.signs, place), granule.scale};
}
__device__ __forceinline__ void decode_mine(const MySigns& signs, float momentum_scale,
                                            float (&momentum)[kMine]) {
  const float scale = momentum_scale == 1.0f ? signs.scale : div_(signs.scale, momentum_scale);
#pragma unroll
  for (int k = 0; k < kMine; ++k) momentum[k] = decode_sign((signs.nibble >> k) & 1u, scale);
}
__device__ __forceinline__ void decode_mine(const OneBitMessages& bits, int64_t position, int lane,
                                            float momentum_scale, float (&momentum)[kMine]) {
  decode_mine(load_signs(bits, position, lane), momentum_scale, momentum);
}

template <class Element>
__device__ __forceinline__ bool in_packets(const Element* elements, int count) {
  return count == kMine && is_packet_aligned<Element, kMine>(elements);
}
template <class Element>
__device__ __forceinline__ void load_mine(const Element* elements, int count, Element (&values)[kMine]) {
  if (in_packets(elements, count)) {
    load_packet(elements, values);
  } else {
#pragma unroll
    for (int k = 0; k < kMine; ++k) values[k] = k < count ? elements[k] : Element{};
  }
}
template <class Element>
__device__ __forceinline__ void store_mine(Element* elements, int count, const Element (&values)[kMine]) {
  if (in_packets(elements, count)) {
    store_packet(elements, values);
  } else {
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      if (k < count) elements[k] = values[k];
    }
  }
}

}  // namespace pacer::kernels
