// The CUDA loops of 1-bit LAMB. Moments: a block per reduction unit, each thread four columns of it down all
// rows, two rows' loads in flight. Factors: a warp per tensor. Update: one short-lived block per tile, as
// 1-bit Adam's. Bytes per element in fp32: 16.25, and 12.13. Deterministic: no atomics, partial results in
// fixed places.
#include <pacer/kernels/onebit_lamb.h>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/cuda/fold.cuh>
#include <pacer/kernels/cuda/onebit_lamb_row.cuh>

namespace pacer::kernels {
namespace {

// Rows whose loads are in flight, and thread blocks on a multiprocessor, which bounds registers: the best of
// 1, 2 and 4 rows and 1 to 4 blocks on an H200.
constexpr int kLambRowsAtOnce = 2, kLambBlocks = 2, kLambUpdateBlocks = 12;

__device__ __forceinline__ float largest_of_warp(float value) {
#pragma unroll
  for (int h = kWarp / 2; h >= 1; h /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, value, h);
    value = other > value ? other : value;
  }
  return value;
}

struct UnitColumns {
  float direction[kMine], update[kMine], ratio;
};

// Of the block; `fours` is scratch.
__device__ __forceinline__ void store_partials(const UnitColumns& columns, uint32_t place,
                                               float (&fours)[2][kRowThreads],
                                               float (&largest)[kRowThreads / kWarp],
                                               const OneBitLambPartials& partials) {
  const float(&d)[kMine] = columns.direction, (&u)[kMine] = columns.update;
  fours[0][threadIdx.x] = (d[0] + d[1]) + (d[2] + d[3]);
  fours[1][threadIdx.x] = (u[0] + u[1]) + (u[2] + u[3]);
  const float of_warp = largest_of_warp(columns.ratio);
  if (threadIdx.x % kWarp == 0) largest[threadIdx.x / kWarp] = of_warp;
  const float sum = fold_block_pair<kRowThreads, kRowThreads>(fours);
  if (threadIdx.x == 0) partials.direction[place] = static_cast<double>(sum);
  if (threadIdx.x == kWarp) partials.update[place] = static_cast<double>(sum);
  if (threadIdx.x >= kWarp) return;
  constexpr int kWarps = kRowThreads / kWarp;
  const float of_block = largest_of_warp(threadIdx.x < kWarps ? largest[threadIdx.x] : 0.0f);
  if (threadIdx.x == 0) partials.ratio[place] = of_block;
}

// All rows of a unit. kWhole: each has all its elements, and they lie where packets do.
template <AdamStorage kStorage, bool kDense, bool kWhole>
__device__ __forceinline__ void advance_unit(const OneBitLambWork& work, const OneBitAdamTensor& tensor,
                                             const Tile& unit,
                                             const LambGranule (&granules)[kUnitRows][kRowGranules],
                                             const LambScalars<float>& scalars, const FrozenBounds& bounds,
                                             UnitColumns& columns) {
  constexpr int kRow = static_cast<int>(kOneBitRow);
  const int size = kWhole ? static_cast<int>(kReductionUnit) : static_cast<int>(unit.count);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float found = 0;  // the largest ratio that a lane of this warp has found
#pragma unroll 1
  for (int first = 0; first * kRow < size; first += kLambRowsAtOnce) {
    LambRow<kStorage, kDense> rows[kLambRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kLambRowsAtOnce; ++r) {
      const int column = (first + r) * kRow + threadIdx.x * kMine;
      const int count = kWhole ? kMine : min(kMine, size - column);
      if (count <= 0) continue;
      rows[r].template load<kWhole>(work, tensor, granules[first + r][warp], unit.offset + column, count,
                                    lane);
    }
#pragma unroll
    for (int r = 0; r < kLambRowsAtOnce; ++r) {
      const int column = (first + r) * kRow + threadIdx.x * kMine;
      const int count = kWhole ? kMine : min(kMine, size - column);
      if (count <= 0) continue;
      LambRow<kStorage, kDense>& row = rows[r];
      const LambGranule& granule = granules[first + r][warp];
      const int64_t position = tensor.begin + unit.offset + column;
#pragma unroll
      for (int k = 0; k < kMine; ++k) {
        if (k >= count) continue;
        row.advance(work, granule, k, position + k, scalars);
        const float denominator = frozen_denominator(row.variance[k], bounds, scalars.epsilon);
        const float direction = lamb_direction(
            frozen_direction(row.momentum_of(granule, k), row.variance[k], denominator, bounds), scalars);
        const float update = lamb_update(direction, row.parameters.value(k), scalars);
        columns.direction[k] = fma_(direction, direction, columns.direction[k]);
        columns.update[k] = fma_(update, update, columns.update[k]);
        columns.ratio = larger_ratio(columns.ratio, found, denominator, row.fresh[k], scalars);
      }
      if constexpr (kWhole) {
        store_packet(work.fresh_variance + position, row.fresh);
      } else {
        store_mine(work.fresh_variance + position, count, row.fresh);
      }
    }
    found = largest_of_warp(columns.ratio);
  }
}

template <AdamStorage kStorage, bool kDense>
__global__ void __launch_bounds__(kRowThreads, kLambBlocks)
    onebit_lamb_moments_kernel(const Tile* __restrict__ units, const uint32_t* __restrict__ places,
                               const OneBitLambWork work, const OneBitControl control) {
  __shared__ LambGranule granules[kUnitRows][kRowGranules];
  __shared__ float fours[2][kRowThreads];
  __shared__ float largest[kRowThreads / kWarp];
  if (stands_still(control)) return;
  const Tile unit = units[blockIdx.x];
  const OneBitAdamTensor& tensor = work.now.tensors[unit.tensor];
  const auto& scalars = work.now.template scalars_of<LambScalars<float>>(tensor);
  if (scalars.skip) return;
  const FrozenBounds bounds = work.now.bounds_of(unit.tensor);
  const bool dense_before =
      work.dense_before != nullptr && (work.before == nullptr || work.before->has_mean == 0);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int size = static_cast<int>(unit.count);
  constexpr int kRow = static_cast<int>(kOneBitRow);
  if (lane < kUnitRows && lane * kRow + warp * kGranule < size) {
    granules[lane][warp] =
        lamb_granule(work, kDense, dense_before, tensor.begin + unit.offset + lane * kRow + warp * kGranule,
                     momentum_scale_of(work.now, unit.tensor), scalars);
  }
  __syncwarp();
  UnitColumns columns{};
  const bool whole = unit.count == kReductionUnit && LambParameters<kStorage>::in_packets(tensor);
  if (whole) {
    advance_unit<kStorage, kDense, true>(work, tensor, unit, granules, scalars, bounds, columns);
  } else {
    advance_unit<kStorage, kDense, false>(work, tensor, unit, granules, scalars, bounds, columns);
  }
  store_partials(columns, places[blockIdx.x], fours, largest, work.partials);
}

constexpr int kFactorThreads = 128;

__global__ void __launch_bounds__(kFactorThreads)
    onebit_lamb_factors_kernel(int64_t tensors, const OneBitLambWork work, const OneBitControl control) {
  const int64_t tensor = blockIdx.x * static_cast<int64_t>(kFactorThreads / kWarp) + threadIdx.x / kWarp;
  if (tensor >= tensors || stands_still(control)) return;
  const auto& [units, bounds] = work.tensors[tensor];
  if (units.count == 0) return;
  const int lane = threadIdx.x % kWarp;
  float largest = 0;
  for (int64_t u = lane; u < units.count; u += kWarp) {
    const float ratio = work.partials.ratio[units.first + u];
    largest = ratio > largest ? ratio : largest;
  }
  largest = largest_of_warp(largest);
  const double direction = sum_list_by_warp(work.partials.direction + units.first, units.count);
  const double update = sum_list_by_warp(work.partials.update + units.first, units.count);
  if (lane != 0) return;
  const auto& scalars = work.now.template scalars_of<LambScalars<float>>(work.now.tensors[tensor]);
  if (scalars.skip) return;
  const double factor =
      lamb_factor(static_cast<double>(largest), direction, update, work.factors[tensor], bounds, scalars);
  work.factors[tensor] = factor;
  work.step_sizes[tensor] = lamb_step_size(work.coefficients[tensor], factor, scalars);
}

// Every load is issued before the first is used, as in 1-bit Adam's update.
template <AdamStorage kStorage, bool kDense>
__global__ void __launch_bounds__(kTileThreads, kLambUpdateBlocks)
    onebit_lamb_update_kernel(const AdamTiles table, const OneBitLambWork work, const OneBitControl control) {
  const auto [tile, index, lane] = my_tile<kTileThreads>(table);
  const int first = lane * kMine, count = min(kMine, static_cast<int>(tile.count) - first);
  if (count <= 0) return;
  const int64_t position = tile.offset + first;
  float variance[kMine], momentum[kMine];
  MySigns signs{};
  load_packet<float, kMine>(work.now.variance + position, variance);
  if constexpr (kDense) {
    load_packet(work.now.dense_momentum + position, momentum);
  } else {
    signs = load_signs(work.now.bits, position, lane);
  }
  const OneBitAdamTensor& tensor = work.now.tensors[tile.tensor];
  const auto& scalars = work.now.template scalars_of<LambScalars<float>>(tensor);
  const FrozenBounds bounds = work.now.bounds_of(tile.tensor);
  const float step_size = work.step_sizes[tile.tensor];
  const float scale = momentum_scale_of(work.now, tile.tensor);
  LambParameters<kStorage> parameters;
  parameters.load(tensor, position - tensor.begin, count);
  if (stands_still(control)) return;
  if constexpr (!kDense) decode_mine(signs, scale, momentum);
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    const float denominator = frozen_denominator(variance[k], bounds, scalars.epsilon);
    const float direction = frozen_direction(momentum[k], variance[k], denominator, bounds);
    const float value = parameters.value(k);
    const float update = lamb_update(lamb_direction(direction, scalars), value, scalars);
    parameters.set(k, fma_(-step_size, update, value));
  }
  if (scalars.skip) return;  // asked earlier, it would stand between the loads
  parameters.store(tensor, position - tensor.begin, count);
}

}  // namespace

void onebit_lamb_moments_cuda(AdamStorage storage, const Tile* units, const uint32_t* places, int64_t count,
                              const OneBitLambWork& work, bool dense, const OneBitControl& control,
                              Stream stream) {
  require(count < (int64_t{1} << 31), "1-bit LAMB on a GPU takes up to 2^46 elements");
  if (count == 0) return;
  with_compressible(storage, [&](auto chosen) {
    const auto kernel =
        dense ? onebit_lamb_moments_kernel<chosen(), true> : onebit_lamb_moments_kernel<chosen(), false>;
    kernel<<<static_cast<unsigned>(count), kRowThreads, 0, stream>>>(units, places, work, control);
  });
  check_launch("the moments of 1-bit LAMB");
}

void onebit_lamb_factors_cuda(int64_t tensors, const OneBitLambWork& work, const OneBitControl& control,
                              Stream stream) {
  const int64_t blocks = ceil_divide(tensors, kFactorThreads / kWarp);
  require(blocks < (int64_t{1} << 31), "more than 2^33 tensors in one launch");
  if (blocks == 0) return;
  onebit_lamb_factors_kernel<<<static_cast<unsigned>(blocks), kFactorThreads, 0, stream>>>(tensors, work,
                                                                                           control);
  check_launch("the factors of 1-bit LAMB");
}

void onebit_lamb_update_cuda(AdamStorage storage, const AdamTiles& tiles, const OneBitLambWork& work,
                             bool dense, const OneBitControl& control, Stream stream) {
  const unsigned blocks = blocks_for<kTileThreads>(tiles);
  if (blocks == 0) return;
  with_compressible(storage, [&](auto chosen) {
    const auto kernel =
        dense ? onebit_lamb_update_kernel<chosen(), true> : onebit_lamb_update_kernel<chosen(), false>;
    kernel<<<blocks, kTileThreads, 0, stream>>>(tiles, work, control);
  });
  check_launch("the update of 1-bit LAMB");
}

}  // namespace pacer::kernels
