// The CUDA loop over groups of elements whose moments lie in memory as codes, for a rule of two moments and a format such as
// that of math/moment_codes.h. Tiles are those of element_loop.cuh; the threads of a group, 4 neighbours of a warp, find
// its largest moments together. Each stream is moved once. Deterministic: the largest of a group does not depend on an
// order. Compile it with --fmad=false.
//
// A step is bound by instructions. So a warp of whole packets takes the short way of ordinary_operands.cuh, in which eight
// elements go side by side; where an operand was not ordinary it begins again on the long way, which all others go. For that
// the rule's only root is that of its new second moment, and its only quotient that of its new first moment by what
// over_root() makes of the root.
#pragma once

#include <pacer/kernels/cuda/coded_packet.cuh>
#include <pacer/kernels/cuda/ordinary_operands.cuh>
#include <pacer/kernels/cuda/ordinary_packet.cuh>

namespace pacer::kernels {

// Where a thread's elements lie, of which the tensor has the first `count`.
template <class Format>
struct CodedPlace {
  const AdamTensor* tensor;
  const void* gradient;
  int64_t first;
  int count;
  bool whole;  // count is that of a packet, and all of it is aligned

  __device__ Float16* scale() const { return scales(tensor->exp_avg_scale); }
  __device__ Float16* scale_sq() const { return scales(tensor->exp_avg_sq_scale); }
  __device__ Float16* scales(void* memory) const {
    return static_cast<Float16*>(memory) + first / Format::kGroup;
  }
};

// A thread's elements with the scales of their group.
template <class Format, AdamStorage kStorage>
struct CodedElements {
  static constexpr int kLanes = Format::kGroup / kCodedPacket;
  CodedPacket<Format, kStorage, kCodedPacket> packet;
  Float16 scale, scale_sq;

  __device__ __forceinline__ void load(const CodedPlace<Format>& place) {
    packet.load(*place.tensor, place.gradient, place.first, place.count, place.whole);
    scale = place.count > 0 ? *place.scale() : Float16{};
    scale_sq = place.count > 0 ? *place.scale_sq() : Float16{};
  }
  __device__ __forceinline__ void store(const CodedPlace<Format>& place) const {
    packet.store(*place.tensor, place.first, place.count, place.whole);
    if (threadIdx.x % kLanes == 0 && place.count > 0) {
      *place.scale() = scale;
      *place.scale_sq() = scale_sq;
    }
  }
};

// A step of a warp, which has whole packets. False, with memory as it was, where an operand was not ordinary.
template <class Rule, class Format, AdamStorage kStorage>
__device__ __forceinline__ bool step_ordinary(CodedElements<Format, kStorage>& mine,
                                              const CodedPlace<Format>& place,
                                              const AdamScalars<float> scalars) {
  constexpr int kMine = kCodedPacket;
  constexpr int kLanes = Format::kGroup / kMine;
  uint32_t random16[kMine] = {};
  draw_random16<kStorage, kMine>(scalars, place.tensor->first_element + place.first, random16);
  const typename Format::First was(mine.scale);
  const typename Format::Second was_sq(mine.scale_sq);
  const ShiftedCodes<kMine> codes(mine.packet.exp_avg), codes_sq(mine.packet.exp_avg_sq);
  OrdinaryOperands operations;
  OrdinaryParameters<kStorage, kMine> parameters;
  float exp_avg[kMine], root[kMine];
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    AdamElement<float> e;
    e.gradient = element_of(mine.packet.gradient, k);
    e.parameter = parameters.load(mine.packet, k);
    e.exp_avg = was.decode_shifted(codes.at(k));
    e.exp_avg_sq = was_sq.decode_shifted(codes_sq.at(k));
    Rule::step(e, scalars, operations);
    parameters.store(e.parameter, random16[k], k);
    exp_avg[k] = e.exp_avg;
    root[k] = operations.root(e.exp_avg_sq);
  }
  const bool ordinary = operations.all_were() & parameters.all_were() & has_ordinary_denominators(scalars);
  if (!__all_sync(0xFFFFFFFFu, ordinary)) return false;
  const uint32_t largest = largest_of_group<kLanes>(operations.largest_dividend());
  const uint32_t largest_sq = largest_of_group<kLanes>(operations.largest_square());
  mine.scale = Format::ordinary_scale(float_of(largest));
  mine.scale_sq = Format::ordinary_scale(operations.root(float_of(largest_sq)));
  const typename Format::First now(mine.scale);
  const typename Format::Second now_sq(mine.scale_sq);
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    mine.packet.exp_avg[k] = now.encode_ordinary(exp_avg[k]);
    mine.packet.exp_avg_sq[k] = now_sq.encode_ordinary_root(root[k]);
  }
  parameters.finish(mine.packet);
  mine.store(place);
  return true;
}

// The same for any operands and any number of elements. A function of its own, so that it costs the other no registers.
template <class Rule, class Format, AdamStorage kStorage>
__device__ __noinline__ void step_any(const CodedPlace<Format> place, const AdamScalars<float>& scalars) {
  constexpr int kMine = kCodedPacket;
  constexpr int kLanes = Format::kGroup / kMine;
  CodedElements<Format, kStorage> mine;
  mine.load(place);
  uint32_t random16[kMine] = {};
  draw_random16<kStorage, kMine>(scalars, place.tensor->first_element + place.first, random16);
  const typename Format::First was(mine.scale);
  const typename Format::Second was_sq(mine.scale_sq);
  float exp_avg[kMine], exp_avg_sq[kMine];
  uint32_t largest = 0, largest_sq = 0;
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    StoredElement<kStorage> stored = mine.packet.element(k);
    AdamElement<float> e;
    e.gradient = load(mine.packet.gradient[k]);
    e.parameter = load_parameter(stored);
    e.exp_avg = was.decode(mine.packet.exp_avg[k]);
    e.exp_avg_sq = was_sq.decode(mine.packet.exp_avg_sq[k]);
    Rule::step(e, scalars);
    store_parameter(e.parameter, random16[k], stored);
    mine.packet.set_element(k, stored);
    exp_avg[k] = e.exp_avg;
    exp_avg_sq[k] = e.exp_avg_sq;
    largest = max(largest, Format::First::measure(e.exp_avg));
    largest_sq = max(largest_sq, Format::Second::measure(e.exp_avg_sq));
  }
  mine.scale = Format::First::scale_of(largest_of_group<kLanes>(largest));
  mine.scale_sq = Format::Second::scale_of(largest_of_group<kLanes>(largest_sq));
  const typename Format::First now(mine.scale);
  const typename Format::Second now_sq(mine.scale_sq);
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    mine.packet.exp_avg[k] = now.encode(exp_avg[k]);
    mine.packet.exp_avg_sq[k] = now_sq.encode(exp_avg_sq[k]);
  }
  mine.store(place);
}

// How many blocks a multiprocessor must hold, which bounds registers to 64: 0.95 of the time of a step with remainders, and
// nothing spills that the short way needs. Stochastic rounding needs more.
template <AdamStorage kStorage>
constexpr int kCodedBlocks =
    kStorage == AdamStorage::bf16_stochastic ? 0 : 32 * kWarp / kCodedThreads<kStorage>;

template <class Rule, class Format, AdamStorage kStorage>
__global__ void __launch_bounds__(kCodedThreads<kStorage>, kCodedBlocks<kStorage>)
    coded_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                 const AdamGradient* __restrict__ gradients, const StepScalars* group_scalars) {
  // A warp has one tile, so that all its threads leave together or none.
  const auto [tile, index, lane] = my_tile<kCodedThreads<kStorage>>(table);
  const AdamGradient gradient = gradients[tile.tensor];
  const AdamTensor tensor = tensors[tile.tensor];
  const int tile_count = gradient.gradient == nullptr ? 0 : static_cast<int>(tile.count);
  const int64_t first = tile.offset + lane * kCodedPacket;
  const int count = min(max(tile_count - lane * kCodedPacket, 0), kCodedPacket);
  const bool whole = count == kCodedPacket &&
                     CodedPacket<Format, kStorage, kCodedPacket>::is_aligned(tensor, gradient.gradient);
  const auto& scalars = group_scalars[gradient.scalars].template as<AdamScalars<float>>();
  // Whether there is anything to do.
  const auto wait = [&] {
    wait_for_previous_kernel();  // by every thread, so that this kernel never ends before the one ahead of it
    return tile_count > 0 && !scalars.skip;
  };
  if (__all_sync(0xFFFFFFFFu, whole)) {
    const CodedPlace<Format> place{&tensor, gradient.gradient, first, kCodedPacket, true};
    CodedElements<Format, kStorage> mine;
    mine.load(place);
    if (!wait() || step_ordinary<Rule>(mine, place, scalars)) return;
  } else {
    if (!wait()) return;
  }
  step_any<Rule, Format, kStorage>({tensors + tile.tensor, gradient.gradient, first, count, whole}, scalars);
}

// Does what elements_cuda does, for a format of moments and every dtype set but fp64.
template <class Rule, class Format>
void coded_cuda(const char* what, AdamLaunch choice, const AdamTiles& tiles, const AdamTensor* tensors,
                const AdamGradient* gradients, const StepScalars* scalars, cudaStream_t stream) {
  with_storage(choice.storage, [&](auto storage) {
    if constexpr (storage() == AdamStorage::f64) {
      require(false, "the moments of fp64 parameters have no codes");
    } else {
      constexpr int kThreads = kCodedThreads<storage()>;
      const unsigned blocks = blocks_for<kThreads>(tiles);
      if (blocks == 0) return;
      launch_overlapped(what, choice.follows_prologue, coded_kernel<Rule, Format, storage()>, blocks,
                        kThreads, stream, tiles, tensors, gradients, scalars);
    }
  });
}

}  // namespace pacer::kernels
