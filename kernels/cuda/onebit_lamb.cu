// The CUDA loops of 1-bit LAMB. Moments: a block per reduction unit, each thread four columns of it down all
// rows, two rows' loads in flight. Factors: a warp per tensor. Update: one short-lived block per tile, as
// 1-bit Adam's. Bytes per element in fp32: 16.25, and 12.13. Deterministic: no atomics, partial results in
// fixed slots.
#include <pacer/kernels/onebit_lamb.h>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/cuda/fold.cuh>
#include <pacer/kernels/cuda/onebit_tiles.cuh>

namespace pacer::kernels {
namespace {

constexpr int kLambRowsAtOnce = 2;

// A thread's four elements of a row, from memory on.
template <AdamStorage kStorage>
struct LambRow {
  using Types = StorageOf<kStorage>;
  float variance[kMine], fresh[kMine], momentum[kMine], before[kMine];
  typename Types::Param parameter[kMine];
  typename Types::Extra extra[kMine];
  MySigns signs, signs_before;

  __device__ __forceinline__ float value(int k) const {
    StoredElement<kStorage> e{};
    e.parameter = parameter[k];
    if constexpr (Types::kHasExtra) e.extra = extra[k];
    return load_parameter(e);
  }
};

template <AdamStorage kStorage>
__device__ __forceinline__ void load_parameters(const OneBitAdamTensor& tensor, int64_t offset, int count,
                                                LambRow<kStorage>& row) {
  using Types = StorageOf<kStorage>;
  load_mine(static_cast<const typename Types::Param*>(tensor.parameter) + offset, count, row.parameter);
  if constexpr (Types::kHasExtra) {
    load_mine(static_cast<const typename Types::Extra*>(tensor.extra) + offset, count, row.extra);
  }
}

// `dense_before`: the momentum before this step.
template <AdamStorage kStorage, bool kDense>
__device__ __forceinline__ void load_row(const OneBitLambWork& work, const OneBitAdamTensor& tensor,
                                         bool dense_before, int64_t offset, int count, int lane,
                                         LambRow<kStorage>& row) {
  const int64_t position = tensor.begin + offset;
  load_packet<float, kMine>(work.now.variance + position, row.variance);
  load_packet<float, kMine>(work.fresh_variance + position, row.fresh);
  load_parameters(tensor, offset, count, row);
  if constexpr (kDense) {
    load_packet(work.now.dense_momentum + position, row.momentum);
  } else {
    row.signs = load_signs(work.now.bits, position, lane);
  }
  if (dense_before) {
    load_packet(work.dense_before + position, row.before);
  } else {
    row.signs_before = load_signs(work.bits_before, position, lane);
  }
}

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

template <AdamStorage kStorage, bool kDense>
__global__ void __launch_bounds__(kRowThreads, 2)
    onebit_lamb_moments_kernel(const Tile* __restrict__ units, const uint32_t* __restrict__ places,
                               const OneBitLambWork work, const OneBitControl control) {
  __shared__ float fours[2][kRowThreads];
  __shared__ float largest[kRowThreads / kWarp];
  if (stands_still(control)) return;
  const Tile unit = units[blockIdx.x];
  const OneBitAdamTensor tensor = work.now.tensors[unit.tensor];
  const LambScalars<float> scalars = work.now.template scalars_of<LambScalars<float>>(tensor);
  const float scale = momentum_scale_of(work.now, unit.tensor), floor = work.now.floors[unit.tensor];
  const bool dense_before =
      work.dense_before != nullptr && (work.before == nullptr || work.before->has_mean == 0);
  const int lane = threadIdx.x;
  UnitColumns columns{};
#pragma unroll 1
  for (int first = lane * kMine; first < static_cast<int>(unit.count);
       first += kLambRowsAtOnce * static_cast<int>(kOneBitRow)) {
    LambRow<kStorage> rows[kLambRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kLambRowsAtOnce; ++r) {
      const int column = first + r * static_cast<int>(kOneBitRow);
      const int count = min(kMine, static_cast<int>(unit.count) - column);
      if (count > 0) {
        load_row<kStorage, kDense>(work, tensor, dense_before, unit.offset + column, count, lane, rows[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kLambRowsAtOnce; ++r) {
      const int column = first + r * static_cast<int>(kOneBitRow);
      const int count = min(kMine, static_cast<int>(unit.count) - column);
      if (count <= 0) continue;
      LambRow<kStorage>& row = rows[r];
      if constexpr (!kDense) decode_mine(row.signs, scale, row.momentum);
      if (!dense_before) decode_mine(row.signs_before, scale, row.before);
#pragma unroll
      for (int k = 0; k < kMine; ++k) {
        if (k >= count) continue;
        row.fresh[k] = fresh_variance(row.momentum[k], row.before[k], row.fresh[k], scalars);
        const float denominator = frozen_denominator(row.variance[k], floor, scalars);
        const float direction = lamb_direction(row.momentum[k], denominator, scalars);
        const float update = lamb_update(direction, row.value(k), scalars);
        const float ratio = denominator_ratio(denominator, row.fresh[k], scalars);
        columns.direction[k] = fma_(direction, direction, columns.direction[k]);
        columns.update[k] = fma_(update, update, columns.update[k]);
        columns.ratio = ratio > columns.ratio ? ratio : columns.ratio;
      }
      store_mine(work.fresh_variance + tensor.begin + unit.offset + column, count, row.fresh);
    }
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
  const double factor =
      lamb_factor(static_cast<double>(largest), direction, update, work.factors[tensor], bounds, scalars);
  work.factors[tensor] = factor;
  work.step_sizes[tensor] = lamb_step_size(work.coefficients[tensor], factor, scalars);
}

// Every load is issued before the first is used, as in 1-bit Adam's update.
template <AdamStorage kStorage, bool kDense>
__global__ void __launch_bounds__(kTileThreads)
    onebit_lamb_update_kernel(const AdamTiles table, const OneBitLambWork work, const OneBitControl control) {
  using Types = StorageOf<kStorage>;
  const auto [tile, index, lane] = my_tile<kTileThreads>(table);
  const int first = lane * kMine, count = min(kMine, static_cast<int>(tile.count) - first);
  if (count <= 0) return;
  const int64_t position = tile.offset + first;
  LambRow<kStorage> row;
  load_packet<float, kMine>(work.now.variance + position, row.variance);
  if constexpr (kDense) {
    load_packet(work.now.dense_momentum + position, row.momentum);
  } else {
    row.signs = load_signs(work.now.bits, position, lane);
  }
  const OneBitAdamTensor& tensor = work.now.tensors[tile.tensor];
  const auto& scalars = work.now.template scalars_of<LambScalars<float>>(tensor);
  const float floor = work.now.floors[tile.tensor], step_size = work.step_sizes[tile.tensor];
  const float scale = momentum_scale_of(work.now, tile.tensor);
  const int64_t offset = position - tensor.begin;
  load_parameters(tensor, offset, count, row);
  if (stands_still(control)) return;
  if constexpr (!kDense) decode_mine(row.signs, scale, row.momentum);
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    const float denominator = frozen_denominator(row.variance[k], floor, scalars);
    const float value = row.value(k);
    const float update = lamb_update(lamb_direction(row.momentum[k], denominator, scalars), value, scalars);
    StoredElement<kStorage> e{};
    e.parameter = row.parameter[k];
    if constexpr (Types::kHasExtra) e.extra = row.extra[k];
    store_parameter(fma_(-step_size, update, value), 0, e);
    row.parameter[k] = e.parameter;
    if constexpr (Types::kHasExtra) row.extra[k] = e.extra;
  }
  store_mine(static_cast<typename Types::Param*>(tensor.parameter) + offset, count, row.parameter);
  if constexpr (Types::kHasExtra) {
    store_mine(static_cast<typename Types::Extra*>(tensor.extra) + offset, count, row.extra);
  }
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
