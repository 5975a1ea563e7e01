// What a kernel that writes 8-bit floats leaves behind on a GPU.
#pragma once

#include <pacer/kernels/math/fp8.h>

namespace pacer::kernels {

// It only grows, so that most blocks need not write.
__device__ __forceinline__ void grow_to(uint32_t* bits, uint32_t to) {
  if (to > *static_cast<volatile uint32_t*>(bits)) atomicMax(bits, to);
}

// All threads of a block of kThreads call it once, with what each saw of the tensor. It measures, or notes
// what was cast with `scale`.
template <int kThreads>
__device__ __forceinline__ void note_amax(const Fp8Target& to, uint32_t amax, float scale) {
  __shared__ uint32_t of_warps[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = amax;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) amax = max(amax, of_warps[warp]);
  if (to.codes == nullptr) return grow_to(to.measured, amax);
  if (to.state != nullptr && to.records) grow_to(&to.state->amax, amax);
  grow_to(reinterpret_cast<uint32_t*>(to.inverse), inverse_bits(amax, scale));
}

}  // namespace pacer::kernels
