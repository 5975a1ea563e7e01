// The folds of core/reduction_order.h by a whole thread block: acc[i] += acc[i + h] for h = kWidth / 2 ... 1.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace pacer::kernels {

template <class Real>
__device__ __forceinline__ Real fold_warp(Real value) {
#pragma unroll
  for (int h = 16; h >= 1; h /= 2) value += __shfl_down_sync(0xFFFFFFFFu, value, h);
  return value;
}

// By at least kWidth / 2 threads; the result is valid in thread 0.
template <int kWidth, class Real>
__device__ Real fold_block(Real* acc) {
  __syncthreads();
#pragma unroll
  for (int h = kWidth / 2; h >= 32; h /= 2) {
    if (threadIdx.x < h) acc[threadIdx.x] += acc[threadIdx.x + h];
    __syncthreads();
  }
  return threadIdx.x < 32 ? fold_warp(acc[threadIdx.x]) : Real{0};
}

// Two arrays side by side, by kThreads threads; the results are valid in threads 0 and 32.
template <int kWidth, int kThreads, class Real>
__device__ Real fold_block_pair(Real (&acc)[2][kWidth]) {
  __syncthreads();
#pragma unroll
  for (int h = kWidth / 2; h >= 32; h /= 2) {
#pragma unroll
    for (int pass = 0; pass < (2 * h + kThreads - 1) / kThreads; ++pass) {
      const int i = pass * kThreads + threadIdx.x;
      if (i < 2 * h) acc[i / h][i % h] += acc[i / h][i % h + h];
    }
    __syncthreads();
  }
  return threadIdx.x < 64 ? fold_warp(acc[threadIdx.x / 32][threadIdx.x % 32]) : Real{0};
}

}  // namespace pacer::kernels
