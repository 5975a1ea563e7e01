// The CUDA loop over groups of elements whose moments lie in memory as codes, for a rule of two moments and a format such as
// that of math/moment_codes.h. Tiles are those of element_loop.cuh; the threads of a group, 4 neighbours of a warp, find
// its largest moments together. Each stream is moved once. Deterministic: the largest of a group does not depend on an
// order. Compile it with --fmad=false.
#pragma once

#include <pacer/kernels/cuda/element_loop.cuh>

namespace pacer::kernels {

// N consecutive elements in registers; those from `count` on are zeros, and are neither read nor written in memory.
template <class Format, AdamStorage kStorage, int N>
struct CodedPacket {
  using Types = StorageOf<kStorage>;
  using Param = typename Types::Param;
  using Extra = typename Types::Extra;
  using FirstCode = typename Format::FirstCode;
  using SecondCode = typename Format::SecondCode;
  Param gradient[N]{};
  Param parameter[N]{};
  Extra extra[N]{};
  FirstCode exp_avg[N]{};
  SecondCode exp_avg_sq[N]{};

  __device__ static bool is_aligned(const AdamTensor& t, const void* g) {
    bool aligned = is_packet_aligned<Param, N>(static_cast<const Param*>(g)) &&
                   is_packet_aligned<Param, N>(static_cast<const Param*>(t.parameter)) &&
                   is_packet_aligned<FirstCode, N>(static_cast<const FirstCode*>(t.exp_avg)) &&
                   is_packet_aligned<SecondCode, N>(static_cast<const SecondCode*>(t.exp_avg_sq));
    if constexpr (Types::kHasExtra) {
      aligned = aligned && is_packet_aligned<Extra, N>(static_cast<const Extra*>(t.master_or_remainder));
    }
    return aligned;
  }

  __device__ __forceinline__ void load(const AdamTensor& t, const void* g, int64_t i, int count, bool whole) {
    load_of(static_cast<const Param*>(g) + i, count, whole, gradient);
    load_of(static_cast<const Param*>(t.parameter) + i, count, whole, parameter);
    load_of(static_cast<const FirstCode*>(t.exp_avg) + i, count, whole, exp_avg);
    load_of(static_cast<const SecondCode*>(t.exp_avg_sq) + i, count, whole, exp_avg_sq);
    if constexpr (Types::kHasExtra)
      load_of(static_cast<const Extra*>(t.master_or_remainder) + i, count, whole, extra);
  }

  __device__ __forceinline__ void store(const AdamTensor& t, int64_t i, int count, bool whole) const {
    store_of(static_cast<Param*>(t.parameter) + i, count, whole, parameter);
    store_of(static_cast<FirstCode*>(t.exp_avg) + i, count, whole, exp_avg);
    store_of(static_cast<SecondCode*>(t.exp_avg_sq) + i, count, whole, exp_avg_sq);
    if constexpr (Types::kHasExtra)
      store_of(static_cast<Extra*>(t.master_or_remainder) + i, count, whole, extra);
  }

 private:
  template <class T>
  __device__ __forceinline__ static void load_of(const T* memory, int count, bool whole, T (&values)[N]) {
    if (whole) return load_packet(memory, values);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k < count) values[k] = memory[k];
    }
  }
  template <class T>
  __device__ __forceinline__ static void store_of(T* memory, int count, bool whole, const T (&values)[N]) {
    if (whole) return store_packet(memory, values);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k < count) memory[k] = values[k];
    }
  }
};

// Eight elements a thread, so that what a group costs is shared among them.
constexpr int kCodedPacket = 8;
template <AdamStorage kStorage>
constexpr int kCodedThreads = kPacket<kStorage>* ElementPolicy<kStorage>::kThreads / kCodedPacket;

// The largest over the kLanes threads of a group, for each of them. All threads of the warp come here.
template <int kLanes>
__device__ __forceinline__ uint32_t largest_of_group(uint32_t largest) {
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, apart));
  }
  return largest;
}

template <class Rule, class Format, AdamStorage kStorage>
__global__ void __launch_bounds__(kCodedThreads<kStorage>)
    coded_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                 const AdamGradient* __restrict__ gradients, const StepScalars* group_scalars) {
  constexpr int kMine = kCodedPacket;
  constexpr int kLanes = Format::kGroup / kMine;
  using Packet = CodedPacket<Format, kStorage, kMine>;

  // A warp has one tile, so that all its threads leave together or none.
  const auto [tile, index, lane] = my_tile<kCodedThreads<kStorage>>(table);
  const AdamGradient gradient = gradients[tile.tensor];
  const AdamTensor tensor = tensors[tile.tensor];
  const int tile_count = gradient.gradient == nullptr ? 0 : static_cast<int>(tile.count);
  const int64_t first = tile.offset + lane * kMine;
  const int count = min(max(tile_count - lane * kMine, 0), kMine);
  const bool whole = count == kMine && Packet::is_aligned(tensor, gradient.gradient);
  auto* const exp_avg_scale = static_cast<Float16*>(tensor.exp_avg_scale) + first / Format::kGroup;
  auto* const exp_avg_sq_scale = static_cast<Float16*>(tensor.exp_avg_sq_scale) + first / Format::kGroup;
  Packet packet;
  Float16 scale{}, scale_sq{};
  if (count > 0) {
    packet.load(tensor, gradient.gradient, first, count, whole);
    scale = *exp_avg_scale;
    scale_sq = *exp_avg_sq_scale;
  }

  wait_for_previous_kernel();  // by every thread, so that this kernel never ends before the one ahead of it
  if (tile_count == 0) return;
  const auto& scalars = group_scalars[gradient.scalars].template as<AdamScalars<float>>();
  if (scalars.skip) return;

  uint32_t random16[kMine] = {};
  draw_random16<kStorage, kMine>(scalars, tensor.first_element + first, random16);
  const typename Format::First was(scale);
  const typename Format::Second was_sq(scale_sq);
  float exp_avg[kMine], exp_avg_sq[kMine];
  uint32_t largest = 0, largest_sq = 0;
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    StoredElement<kStorage> stored{};
    stored.parameter = packet.parameter[k];
    stored.extra = packet.extra[k];
    AdamElement<float> e;
    e.gradient = load(packet.gradient[k]);
    e.parameter = load_parameter(stored);
    e.exp_avg = was.decode(packet.exp_avg[k]);
    e.exp_avg_sq = was_sq.decode(packet.exp_avg_sq[k]);
    Rule::step(e, scalars);
    store_parameter(e.parameter, random16[k], stored);
    packet.parameter[k] = stored.parameter;
    packet.extra[k] = stored.extra;
    exp_avg[k] = e.exp_avg;
    exp_avg_sq[k] = e.exp_avg_sq;
    largest = max(largest, Format::First::measure(e.exp_avg));
    largest_sq = max(largest_sq, Format::Second::measure(e.exp_avg_sq));
  }
  scale = Format::scale(largest_of_group<kLanes>(largest));
  scale_sq = Format::scale(largest_of_group<kLanes>(largest_sq));
  const typename Format::First now(scale);
  const typename Format::Second now_sq(scale_sq);
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    packet.exp_avg[k] = now.encode(exp_avg[k]);
    packet.exp_avg_sq[k] = now_sq.encode(exp_avg_sq[k]);
  }
  if (count == 0) return;
  packet.store(tensor, first, count, whole);
  if (lane % kLanes == 0) {
    *exp_avg_scale = scale;
    *exp_avg_sq_scale = scale_sq;
  }
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
