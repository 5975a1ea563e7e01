// What the CUDA loops of LAMB share, whatever the format of moments: how a thread block or a warp brings the squares of its
// unit together, and the trust ratios.
#pragma once

#include <cstdint>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/lamb.h>
#include <pacer/kernels/cuda/fold.cuh>
#include <pacer/kernels/cuda/packet.cuh>

namespace pacer::kernels {

constexpr int kLambFours = kReductionColumns / 4;

// The partial sums of unit number `index` from the squares of parameters and of updates, of which each thread has N
// columns, those from N * lane on. By a whole block, or where not by_block by a warp, whose unit has at most
// kLambWarpUnit elements. `fours` is the block's shared memory.
template <int kThreads, int N, class Real>
__device__ __forceinline__ void write_partials(int64_t index, int lane, bool by_block,
                                               const Real (&squares)[2][N], Real (&fours)[2][kLambFours],
                                               const LambPartials& partials) {
  static_assert(kLambWarpUnit == 4 * kWarp && kThreads <= kLambFours);
  const int first = lane * N;
  // A block folds 512 fours, a warp the 32 that its unit can have, in a place of its own.
  const int own_fours = by_block ? 0 : static_cast<int>(threadIdx.x) / kWarp * kWarp;
  if (by_block || first < kLambWarpUnit) {
#pragma unroll
    for (int sum = 0; sum < 2; ++sum) {
#pragma unroll
      for (int c = 0; c < N; c += 4) {
        fours[sum][own_fours + (first + c) / 4] =
            (squares[sum][c] + squares[sum][c + 1]) + (squares[sum][c + 2] + squares[sum][c + 3]);
      }
    }
  }
  if (by_block) {
    const Real sum = fold_block_pair<kLambFours, kThreads>(fours);
    if (threadIdx.x == 0) partials.parameter[index] = static_cast<double>(sum);
    if (threadIdx.x == kWarp) partials.update[index] = static_cast<double>(sum);
  } else {
    __syncwarp();
    const Real parameter = fold_warp(fours[0][own_fours + lane]);
    const Real update = fold_warp(fours[1][own_fours + lane]);
    if (lane == 0) {
      partials.parameter[index] = static_cast<double>(parameter);
      partials.update[index] = static_cast<double>(update);
    }
  }
}

// The sum of `count` partials in the order of sum_partials, by a warp: lane l holds columns l, l + 32, ...
__device__ __forceinline__ void sum_partials_by_warp(const LambPartials& partials, const TileRange& units,
                                                     double& parameter, double& update) {
  constexpr int kMine = static_cast<int>(kPartialColumns) / kWarp;
  const int lane = threadIdx.x % kWarp;
  double sums[2][kMine] = {};
#pragma unroll 2
  for (int64_t row = 0; row < units.count; row += kPartialColumns) {
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int64_t i = row + k * kWarp + lane;
      if (i >= units.count) continue;
      sums[0][k] += partials.parameter[units.first + i];
      sums[1][k] += partials.update[units.first + i];
    }
  }
#pragma unroll
  for (int h = kMine / 2; h >= 1; h /= 2) {
#pragma unroll
    for (int k = 0; k < h; ++k) {
      sums[0][k] += sums[0][k + h];
      sums[1][k] += sums[1][k + h];
    }
  }
  parameter = fold_warp(sums[0][0]);
  update = fold_warp(sums[1][0]);
}

constexpr int kRatioThreads = 128;

// A warp per tensor. The update may start loading meanwhile: the moments are complete.
template <class Real>
__global__ void __launch_bounds__(kRatioThreads)
    ratio_kernel(const TileRange* __restrict__ units_of, int64_t tensors,
                 const AdamGradient* __restrict__ gradients, const StepScalars* group_scalars,
                 const LambPartials partials, LambRatio* ratios, LambAverage* const* averages) {
  let_next_kernel_start();
  const int64_t tensor = blockIdx.x * static_cast<int64_t>(kRatioThreads / kWarp) + threadIdx.x / kWarp;
  if (tensor >= tensors || gradients[tensor].gradient == nullptr) return;
  const auto& scalars = group_scalars[gradients[tensor].scalars].template as<LambScalars<Real>>();
  if (scalars.skip) return;
  double parameter, update;
  sum_partials_by_warp(partials, units_of[tensor], parameter, update);
  if (threadIdx.x % kWarp != 0) return;
  LambAverage* average = averages == nullptr ? nullptr : averages[tensor];
  ratios[tensor] = lamb_ratio(parameter, update, scalars, average);
}

// Enqueues the ratios of all tensors, those without elements, too.
template <class Real>
void launch_ratios(const LambWork& work, const AdamGradient* gradients, const StepScalars* scalars,
                   cudaStream_t stream) {
  const int64_t blocks = ceil_divide(work.tensors, kRatioThreads / kWarp);
  require(blocks < (int64_t{1} << 31), "more than 2^33 tensors in one launch");
  if (blocks == 0) return;
  ratio_kernel<Real><<<static_cast<unsigned>(blocks), kRatioThreads, 0, stream>>>(
      work.units_of, work.tensors, gradients, scalars, work.partials, work.ratios, work.averages);
  check_launch("the LAMB trust ratios");
}

}  // namespace pacer::kernels
