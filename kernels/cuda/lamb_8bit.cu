// The CUDA loops of LAMB with moments in 8 bits, in three launches as lamb.cu. Moments: a block per reduction unit, each
// thread 8 columns of it down all rows; the 4 neighbours of a warp that share a group find its largest moments together,
// and each goes on with what its codes say. Update: one short-lived block per tile, where each thread has 8 elements.
// Cost in fp32: 12.25 + 10.125 B per element, 16 B per unit, 32 B per tensor. Deterministic: no atomics, the largest of a
// group does not depend on an order, sums are those of lamb.cu.
#include <pacer/kernels/lamb_8bit.h>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/math/moment_codes.h>
#include <pacer/kernels/cuda/coded_packet.cuh>
#include <pacer/kernels/cuda/lamb_sums.cuh>

namespace pacer::kernels {
namespace {

using Codes = EightBitMoments;
constexpr int kMine = kCodedPacket;
constexpr int kLanes = Codes::kGroup / kMine;  // that share a group
constexpr int kUnitThreads = static_cast<int>(kReductionColumns) / kMine;

template <AdamStorage kStorage>
using Packet = CodedPacket<Codes, kStorage, kMine>;

// The new moments of a thread's elements, of which the tensor has the first `count`: their codes in the packet, their
// scales, and their squares added to the thread's columns. All threads of the warp come here.
template <AdamStorage kStorage>
__device__ __forceinline__ void advance(Packet<kStorage>& packet, int count,
                                        const LambScalars<float>& scalars, Float16& scale, Float16& scale_sq,
                                        float (&squares)[2][kMine]) {
  const Codes::First was(scale);
  const Codes::Second was_sq(scale_sq);
  float exp_avg[kMine], exp_avg_sq[kMine];
  uint32_t largest = 0, largest_sq = 0;
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    exp_avg[k] = was.decode(packet.exp_avg[k]);
    exp_avg_sq[k] = was_sq.decode(packet.exp_avg_sq[k]);
    update_moments(mul_(scalars.factor, load(packet.gradient[k])), scalars, exp_avg[k], exp_avg_sq[k]);
    largest = max(largest, Codes::First::measure(exp_avg[k]));
    largest_sq = max(largest_sq, Codes::Second::measure(exp_avg_sq[k]));
  }
  scale = Codes::First::scale_of(largest_of_group<kLanes>(largest));
  scale_sq = Codes::Second::scale_of(largest_of_group<kLanes>(largest_sq));
  const Codes::First now(scale);
  const Codes::Second now_sq(scale_sq);
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    packet.exp_avg[k] = now.encode(exp_avg[k]);
    packet.exp_avg_sq[k] = now_sq.encode(exp_avg_sq[k]);
    if (k >= count) continue;
    const LambTerms<float> terms =
        lamb_terms_of_codes(load_parameter(packet.element(k)), now.decode(packet.exp_avg[k]),
                            now_sq.decode(packet.exp_avg_sq[k]), scalars);
    squares[0][k] = fma_(terms.parameter, terms.parameter, squares[0][k]);
    squares[1][k] = fma_(terms.update, terms.update, squares[1][k]);
  }
}

template <AdamStorage kStorage>
__global__ void __launch_bounds__(kUnitThreads)
    coded_moments_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                         const AdamGradient* __restrict__ gradients, const StepScalars* group_scalars,
                         const LambPartials partials) {
  __shared__ float fours[2][kLambFours];
  // A block or a warp has one unit, so that all its threads leave together or none.
  const auto [unit, index, lane] = my_tile<kUnitThreads>(table);
  const AdamGradient gradient = gradients[unit.tensor];
  const AdamTensor tensor = tensors[unit.tensor];
  wait_for_previous_kernel();  // by every thread, so that this kernel never ends before the one ahead of it
  if (gradient.gradient == nullptr || unit.count == 0) return;
  const auto& scalars = group_scalars[gradient.scalars].template as<LambScalars<float>>();
  if (scalars.skip) return;
  const bool aligned = Packet<kStorage>::is_aligned(tensor, gradient.gradient);
  const int elements = static_cast<int>(unit.count);
  float squares[2][kMine] = {};
#pragma unroll 1
  for (int row = 0; row < elements; row += kReductionColumns) {
    const int64_t first = unit.offset + row + lane * kMine;
    const int count = min(max(elements - row - lane * kMine, 0), kMine);
    const bool whole = count == kMine && aligned;
    auto* const exp_avg_scale = static_cast<Float16*>(tensor.exp_avg_scale) + first / Codes::kGroup;
    auto* const exp_avg_sq_scale = static_cast<Float16*>(tensor.exp_avg_sq_scale) + first / Codes::kGroup;
    Packet<kStorage> packet;
    Float16 scale{}, scale_sq{};
    packet.load(tensor, gradient.gradient, first, count, whole);
    if (count > 0) {
      scale = *exp_avg_scale;
      scale_sq = *exp_avg_sq_scale;
    }
    advance(packet, count, scalars, scale, scale_sq, squares);
    if (count == 0) continue;
    packet.store_moments(tensor, first, count, whole);
    if (lane % kLanes == 0) {
      *exp_avg_scale = scale;
      *exp_avg_sq_scale = scale_sq;
    }
  }
  write_partials<kUnitThreads>(index, lane, blockIdx.x < table.block_tiles, squares, fours, partials);
}

template <AdamStorage kStorage>
__global__ void __launch_bounds__(kCodedThreads<kStorage>)
    coded_update_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                        const AdamGradient* __restrict__ gradients, const StepScalars* group_scalars,
                        const LambRatio* ratios) {
  const auto [tile, index, lane] = my_tile<kCodedThreads<kStorage>>(table);
  const AdamGradient gradient = gradients[tile.tensor];
  const AdamTensor tensor = tensors[tile.tensor];
  const int tile_count = gradient.gradient == nullptr ? 0 : static_cast<int>(tile.count);
  const int64_t first = tile.offset + lane * kMine;
  const int count = min(max(tile_count - lane * kMine, 0), kMine);
  const bool whole = count == kMine && Packet<kStorage>::is_aligned(tensor, nullptr);
  Packet<kStorage> packet;
  Float16 scale{}, scale_sq{};
  packet.load_state(tensor, first, count, whole);
  if (count > 0) {
    scale = static_cast<const Float16*>(tensor.exp_avg_scale)[first / Codes::kGroup];
    scale_sq = static_cast<const Float16*>(tensor.exp_avg_sq_scale)[first / Codes::kGroup];
  }

  wait_for_previous_kernel();  // by every thread, so that this kernel never ends before the one ahead of it
  if (count == 0) return;
  const auto& scalars = group_scalars[gradient.scalars].template as<LambScalars<float>>();
  if (scalars.skip) return;
  const auto step_size = static_cast<float>(ratios[tile.tensor].step_size);
  uint32_t random16[kMine] = {};
  draw_random16<kStorage, kMine>(scalars, tensor.first_element + first, random16);
  const Codes::First exp_avg(scale);
  const Codes::Second exp_avg_sq(scale_sq);
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    StoredElement<kStorage> stored = packet.element(k);
    const LambTerms<float> terms =
        lamb_terms_of_codes(load_parameter(stored), exp_avg.decode(packet.exp_avg[k]),
                            exp_avg_sq.decode(packet.exp_avg_sq[k]), scalars);
    store_parameter(lamb_parameter(terms, step_size), random16[k], stored);
    packet.set_element(k, stored);
  }
  packet.store_parameters(tensor, first, count, whole);
}

template <AdamStorage kStorage>
void launch(const LambWork& work, const AdamTensor* tensors, const AdamGradient* gradients,
            const StepScalars* scalars, bool follows_prologue, cudaStream_t stream, LambLaunches which) {
  constexpr int kUpdateThreads = kCodedThreads<kStorage>;
  const unsigned unit_blocks = blocks_for<kUnitThreads>(work.units);
  const unsigned update_blocks = blocks_for<kUpdateThreads>(work.tiles);
  if (unit_blocks > 0 && which != LambLaunches::ratio_and_update) {
    launch_overlapped("the LAMB moments in 8 bits", follows_prologue, coded_moments_kernel<kStorage>,
                      unit_blocks, kUnitThreads, stream, work.units, tensors, gradients, scalars,
                      work.partials);
  }
  if (which == LambLaunches::moments) return;
  launch_ratios<float>(work, gradients, scalars, stream);
  if (update_blocks > 0) {
    launch_overlapped("the LAMB update in 8 bits", /*overlap_wanted=*/true, coded_update_kernel<kStorage>,
                      update_blocks, kUpdateThreads, stream, work.tiles, tensors, gradients, scalars,
                      work.ratios);
  }
}

}  // namespace

void lamb_8bit_cuda(AdamStorage storage, const LambWork& work, const AdamTensor* tensors,
                    const AdamGradient* gradients, const StepScalars* scalars, bool follows_prologue,
                    Stream stream, LambLaunches which) {
  with_storage(storage, [&](auto chosen) {
    if constexpr (chosen() == AdamStorage::f64) {
      require(false, "the moments of fp64 parameters have no codes in 8 bits");
    } else {
      launch<chosen()>(work, tensors, gradients, scalars, follows_prologue, stream, which);
    }
  });
}

}  // namespace pacer::kernels
