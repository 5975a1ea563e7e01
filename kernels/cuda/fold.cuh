// The folds of core/reduction_order.h by a whole thread block: acc[i] += acc[i + h] for h = kWidth / 2 ... 1.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include <pacer/core/reduction_order.h>

namespace pacer::kernels {

template <class Real>
__device__ __forceinline__ Real fold_warp(Real value) {
#pragma unroll
  for (int h = 16; h >= 1; h /= 2) value += __shfl_down_sync(0xFFFFFFFFu, value, h);
  return value;
}

// Call it with at least kWidth / 2 threads; the result is valid in thread 0.
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

// The sum of `count` partials in the order of sum_partials, by a warp: lane l holds columns l, l + 32, ...
// Valid in lane 0.
__device__ __forceinline__ double sum_list_by_warp(const double* partials, int64_t count) {
  constexpr int kColumnsOfLane = static_cast<int>(kPartialColumns) / 32;
  const int lane = threadIdx.x % 32;
  double sums[kColumnsOfLane] = {};
  for (int64_t row = 0; row < count; row += kPartialColumns) {
#pragma unroll
    for (int k = 0; k < kColumnsOfLane; ++k) {
      const int64_t i = row + k * 32 + lane;
      if (i < count) sums[k] += partials[i];
    }
  }
#pragma unroll
  for (int h = kColumnsOfLane / 2; h >= 1; h /= 2) {
#pragma unroll
    for (int k = 0; k < h; ++k) sums[k] += sums[k + h];
  }
  return fold_warp(sums[0]);
}

// The same by kPartialColumns threads; valid in thread 0.
__device__ __forceinline__ double sum_partials_by_block(const double* partials, int64_t count) {
  __shared__ double columns[kPartialColumns];
  double column = 0;
#pragma unroll 8  // as many loads on their way
  for (int64_t i = threadIdx.x; i < count; i += kPartialColumns) column += partials[i];
  columns[threadIdx.x] = column;
  return fold_block<kPartialColumns>(columns);
}

}  // namespace pacer::kernels
