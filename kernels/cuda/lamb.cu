// The CUDA loops of the LAMB kernels, three launches. Moments: a block per reduction unit, each thread 4 (or
// 8) columns of it down all rows, with the next row's loads in flight while it computes one; then the fold of
// the block's two sums. Tensors of a warp's size get a warp. Ratio: a warp per tensor. Update: like Adam's,
// one short-lived block per tile. Cost in fp32: 24 + 16 B per element, 16 B per unit, 32 B per tensor.
// Deterministic: no atomics, partials in fixed places, the order of core/reduction_order.h.
#include <pacer/kernels/lamb.h>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/cuda/lamb_packet.cuh>
#include <pacer/kernels/cuda/lamb_sums.cuh>

namespace pacer::kernels {
namespace {

constexpr int kLambRows = kReductionUnit / kReductionColumns;

template <AdamStorage kStorage>
using RealOf = typename StorageOf<kStorage>::Real;
template <AdamStorage kStorage>
using ScalarsOf = LambScalars<RealOf<kStorage>>;

template <AdamStorage kStorage>
__device__ __forceinline__ const ScalarsOf<kStorage>& scalars_of(const AdamGradient& gradient,
                                                                 const StepScalars* group_scalars) {
  return group_scalars[gradient.scalars].template as<ScalarsOf<kStorage>>();
}

// Columns per thread of a block: 16-byte accesses to the moments.
template <AdamStorage kStorage>
constexpr int kLambColumns = kStorage == AdamStorage::bf16 ? 8 : 4;
template <AdamStorage kStorage>
constexpr int kUnitThreads = static_cast<int>(kReductionColumns) / kLambColumns<kStorage>;
template <AdamStorage kStorage>
constexpr int kUnitBlocks = kStorage == AdamStorage::f64    ? 1
                            : kStorage == AdamStorage::bf16 ? 3
                                                            : 2;

// The next row of a whole unit on its way, in shared memory: 64 B a thread in fp32, so that the 1024 threads
// of a multiprocessor always have 64 KiB in flight and none of it in registers.
template <AdamStorage kStorage, int N>
struct NextRow {
  using Mine = LambPacket<kStorage, N>;
  static constexpr int kThreads = kUnitThreads<kStorage>;
  static constexpr bool kHasExtra = Mine::Types::kHasExtra;
  alignas(16) typename Mine::State exp_avg[kThreads][N];
  alignas(16) typename Mine::State exp_avg_sq[kThreads][N];
  alignas(16) typename Mine::Param gradient[kThreads][N];
  alignas(16) typename Mine::Param parameter[kThreads][N];
  alignas(16) typename Mine::Extra extra[kHasExtra ? kThreads : 1][N];

  __device__ __forceinline__ void fetch(const AdamTensor& t, const void* g, int64_t i) {
    const int lane = threadIdx.x;
    copy_packet_async(static_cast<const typename Mine::Param*>(g) + i, gradient[lane]);
    copy_packet_async(static_cast<const typename Mine::Param*>(t.parameter) + i, parameter[lane]);
    if constexpr (kHasExtra) {
      copy_packet_async(static_cast<const typename Mine::Extra*>(t.master_or_remainder) + i, extra[lane]);
    }
    copy_packet_async(static_cast<const typename Mine::State*>(t.exp_avg) + i, exp_avg[lane]);
    copy_packet_async(static_cast<const typename Mine::State*>(t.exp_avg_sq) + i, exp_avg_sq[lane]);
  }
  __device__ __forceinline__ void take(Mine& packet) {
    const int lane = threadIdx.x;
    wait_for_copies();
    load_packet(gradient[lane], packet.gradient);
    load_packet(parameter[lane], packet.parameter);
    if constexpr (kHasExtra) load_packet(extra[lane], packet.extra);
    load_packet(exp_avg[lane], packet.exp_avg);
    load_packet(exp_avg_sq[lane], packet.exp_avg_sq);
  }
};

// fp64 rows do not fit into static shared memory; they are loaded when they are needed.
template <AdamStorage kStorage>
constexpr bool kFetchesAhead = kStorage != AdamStorage::f64;

// All rows of a whole unit, the first of which is on its way. `mine`: the thread's first element of the
// tensor.
template <AdamStorage kStorage, int N, class Next>
__device__ __forceinline__ void moments_of_whole_unit(const AdamTensor& tensor, const void* gradient,
                                                      int64_t mine, const ScalarsOf<kStorage>& scalars,
                                                      Next& next, RealOf<kStorage> (&squares)[2][N]) {
#pragma unroll 1
  for (int row = 0; row < kLambRows; ++row, mine += kReductionColumns) {
    LambPacket<kStorage, N> packet;
    if constexpr (kFetchesAhead<kStorage>) {
      next.take(packet);
      if (row + 1 < kLambRows) next.fetch(tensor, gradient, mine + kReductionColumns);
    } else {
      packet.load_gradient(gradient, mine);
      packet.load_state(tensor, mine);
    }
    packet.advance(scalars, N, squares[0], squares[1]);
    packet.store_moments(tensor, mine);
  }
}

// A unit of any size and alignment. `first`: the thread's first column.
template <AdamStorage kStorage, int N>
__device__ __forceinline__ void moments_of_part(const AdamTensor& tensor, const void* gradient,
                                                const Tile& unit, int first, bool aligned,
                                                const ScalarsOf<kStorage>& scalars,
                                                RealOf<kStorage> (&squares)[2][N]) {
#pragma unroll 1
  for (int column = first; column < static_cast<int>(unit.count); column += kReductionColumns) {
    const int64_t i = unit.offset + column;
    const int count = min(N, static_cast<int>(unit.count) - column);
    const bool in_packets = aligned && count == N;
    LambPacket<kStorage, N> packet;
    if (in_packets) {
      packet.load_gradient(gradient, i);
      packet.load_state(tensor, i);
    } else {
      packet.load_first(tensor, gradient, i, count);
    }
    packet.advance(scalars, count, squares[0], squares[1]);
    in_packets ? packet.store_moments(tensor, i) : packet.store_first_moments(tensor, i, count);
  }
}

template <AdamStorage kStorage>
__global__ void __launch_bounds__(kUnitThreads<kStorage>, kUnitBlocks<kStorage>)
    moments_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                   const AdamGradient* __restrict__ gradients, const StepScalars* group_scalars,
                   const LambPartials partials) {
  constexpr int N = kLambColumns<kStorage>;
  constexpr int kThreads = kUnitThreads<kStorage>;
  using Real = RealOf<kStorage>;
  __shared__ std::conditional_t<kFetchesAhead<kStorage>, NextRow<kStorage, N>, Nothing> next;
  __shared__ Real fours[2][kLambFours];
  const auto [unit, index, lane] = my_tile<kThreads>(table);
  const AdamGradient gradient = gradients[unit.tensor];
  const AdamTensor tensor = tensors[unit.tensor];
  const bool left_alone = gradient.gradient == nullptr || unit.count == 0;
  const bool by_block = blockIdx.x < table.block_tiles;
  const int first = lane * N;
  const bool aligned = LambPacket<kStorage, N>::is_aligned(tensor, gradient.gradient);
  const bool whole = by_block && !left_alone && aligned && unit.count == kReductionUnit;
  if constexpr (kFetchesAhead<kStorage>) {
    if (whole) next.fetch(tensor, gradient.gradient, unit.offset + first);
  }

  wait_for_previous_kernel();  // by every thread, so that this kernel never ends before the one ahead of it
  if (left_alone) return;
  const auto& scalars = scalars_of<kStorage>(gradient, group_scalars);
  if (scalars.skip) {
    wait_for_copies();
    return;
  }
  Real squares[2][N] = {};
  if (whole) {
    moments_of_whole_unit<kStorage>(tensor, gradient.gradient, unit.offset + first, scalars, next, squares);
  } else {
    moments_of_part<kStorage>(tensor, gradient.gradient, unit, first, aligned, scalars, squares);
  }
  write_partials<kThreads>(index, lane, by_block, squares, fours, partials);
}

constexpr int kUpdateThreads = 128;  // of the update

template <AdamStorage kStorage>
__global__ void __launch_bounds__(kUpdateThreads)
    update_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                  const AdamGradient* __restrict__ gradients, const StepScalars* group_scalars,
                  const LambRatio* ratios) {
  using Real = RealOf<kStorage>;
  using Full = LambPacket<kStorage, kPacket<kStorage>>;
  using Single = LambPacket<kStorage, 1>;
  constexpr int kMine = kPacket<kStorage>;
  const auto [tile, index, lane] = my_tile<kUpdateThreads>(table);
  const AdamGradient gradient = gradients[tile.tensor];
  const AdamTensor tensor = tensors[tile.tensor];
  const int count = gradient.gradient == nullptr ? 0 : static_cast<int>(tile.count);
  const int first = lane * kMine;
  const bool whole = first + kMine <= count && Full::is_aligned(tensor, nullptr);
  Full packet;
  if (whole) packet.load_state(tensor, tile.offset + first);

  wait_for_previous_kernel();  // by every thread, so that this kernel never ends before the one ahead of it
  if (count == 0) return;
  const auto& scalars = scalars_of<kStorage>(gradient, group_scalars);
  if (scalars.skip) return;
  const auto step_size = static_cast<Real>(ratios[tile.tensor].step_size);
  if (whole) {
    packet.update(scalars, step_size, tensor.first_element + tile.offset + first);
    packet.store_parameters(tensor, tile.offset + first);
    return;
  }
#pragma unroll 1
  for (int k = first; k < count && k < first + kMine; ++k) {
    Single single;
    single.load_state(tensor, tile.offset + k);
    single.update(scalars, step_size, tensor.first_element + tile.offset + k);
    single.store_parameters(tensor, tile.offset + k);
  }
}

template <AdamStorage kStorage>
void launch(const LambWork& work, const AdamTensor* tensors, const AdamGradient* gradients,
            const StepScalars* scalars, bool follows_prologue, cudaStream_t stream, LambLaunches which) {
  constexpr int kMomentsThreads = kUnitThreads<kStorage>;
  const unsigned unit_blocks = blocks_for<kMomentsThreads>(work.units);
  const unsigned update_blocks = blocks_for<kUpdateThreads>(work.tiles);
  if (unit_blocks > 0 && which != LambLaunches::ratio_and_update) {
    launch_overlapped("the LAMB moments", follows_prologue, moments_kernel<kStorage>, unit_blocks,
                      kMomentsThreads, stream, work.units, tensors, gradients, scalars, work.partials);
  }
  if (which == LambLaunches::moments) return;
  launch_ratios<RealOf<kStorage>>(work, gradients, scalars, stream);
  if (update_blocks > 0) {
    launch_overlapped("the LAMB update", /*overlap_wanted=*/true, update_kernel<kStorage>, update_blocks,
                      kUpdateThreads, stream, work.tiles, tensors, gradients, scalars, work.ratios);
  }
}

}  // namespace

void lamb_cuda(AdamStorage storage, const LambWork& work, const AdamTensor* tensors,
               const AdamGradient* gradients, const StepScalars* scalars, bool follows_prologue,
               Stream stream, LambLaunches which) {
  with_storage(storage, [&](auto chosen) {
    launch<chosen()>(work, tensors, gradients, scalars, follows_prologue, stream, which);
  });
}

}  // namespace pacer::kernels
