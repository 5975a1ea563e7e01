// The CUDA loop over elements, for every rule of math/adam.h. One short-lived thread block per tile
// and no persistent grid: every thread issues all its loads, then computes, then stores (1 iteration per
// thread reaches 99 % of copy bandwidth, 4 iterations 97 %, a persistent grid 93 %, on an H200). Tiles of
// tiny tensors are worked on by one warp each. Cost: each stream of adam_storage.h once, plus 16 B of tile
// table per tile. Deterministic: elements are independent. Compile it with --fmad=false.
#pragma once

#include <type_traits>

#include <pacer/kernels/adam.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/cuda/packet.cuh>
#include <pacer/kernels/cuda/visible_rows.cuh>

namespace pacer::kernels {

// How the loop over a dtype set is cut, and how many blocks a multiprocessor must hold, which bounds
// registers. Measured on an H100, of copy bandwidth for GPT-2's tensors: 64 threads instead of 128 give pure
// bf16 .962 instead of .955 and nothing to the others; two rows a warp instead of packets of eight give
// stochastic rounding .965 instead of .946, and 7 blocks (72 registers, not 80) .980; 8 blocks spill, .893. A
// bound that makes others spill costs 4 to 18 points.
template <AdamStorage kStorage>
struct ElementPolicy {
  static constexpr int kThreads = kStorage == AdamStorage::bf16 ? 64 : 128;
  static constexpr bool kInRows = kStorage == AdamStorage::bf16_stochastic;
  static constexpr int kBlocks = kInRows ? 7 : 0;  // 0: no bound
};

// N consecutive elements in registers.
template <class Rule, AdamStorage kStorage, int N>
struct ElementPacket {
  using Types = StorageOf<kStorage>;
  using Real = typename Types::Real;
  using Param = typename Types::Param;
  using State = typename Types::State;
  using Extra = typename Types::Extra;
  Param gradient[N];
  Param parameter[N];
  State exp_avg[N];
  State exp_avg_sq[N];
  State max_exp_avg_sq[N];
  Extra extra[N];

  __device__ static bool is_aligned(const AdamTensor& t, const void* g) {
    bool aligned = is_packet_aligned<Param, N>(static_cast<const Param*>(g)) &&
                   is_packet_aligned<Param, N>(static_cast<const Param*>(t.parameter));
    if constexpr (kHasFirstMoment<Rule>) {
      aligned = aligned && is_packet_aligned<State, N>(static_cast<const State*>(t.exp_avg));
    }
    if constexpr (Rule::kSecondMoment) {
      aligned = aligned && is_packet_aligned<State, N>(static_cast<const State*>(t.exp_avg_sq));
    }
    if constexpr (Rule::kMaxMoment) {
      aligned = aligned && is_packet_aligned<State, N>(static_cast<const State*>(t.max_exp_avg_sq));
    }
    if constexpr (Types::kHasExtra) {
      aligned = aligned && is_packet_aligned<Extra, N>(static_cast<const Extra*>(t.master_or_remainder));
    }
    return aligned;
  }

  __device__ __forceinline__ void load(const AdamTensor& t, const void* g, int64_t i) {
    load_some(static_cast<const Param*>(g) + i, gradient);
    load_some(static_cast<const Param*>(t.parameter) + i, parameter);
    if constexpr (kHasFirstMoment<Rule>) load_some(static_cast<const State*>(t.exp_avg) + i, exp_avg);
    if constexpr (Rule::kSecondMoment) load_some(static_cast<const State*>(t.exp_avg_sq) + i, exp_avg_sq);
    if constexpr (Rule::kMaxMoment)
      load_some(static_cast<const State*>(t.max_exp_avg_sq) + i, max_exp_avg_sq);
    if constexpr (Types::kHasExtra) load_some(static_cast<const Extra*>(t.master_or_remainder) + i, extra);
  }

  __device__ __forceinline__ void step(const AdamScalars<Real>& scalars, int64_t real_index) {
    uint32_t random16[N] = {};
    draw_random16<kStorage, N>(scalars, real_index, random16);
    step(scalars, random16);
  }

  // Those elements whose bits are set in `which`.
  __device__ __forceinline__ void step(const AdamScalars<Real>& scalars, const uint32_t (&random16)[N],
                                       uint32_t which = ~0u) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (!(which >> k & 1)) continue;
      StoredElement<kStorage> e{gradient[k],   parameter[k],      exp_avg[k],
                                exp_avg_sq[k], max_exp_avg_sq[k], extra[k]};
      step_stored<Rule, kStorage>(e, scalars, random16[k]);
      parameter[k] = e.parameter;
      exp_avg[k] = e.exp_avg;
      exp_avg_sq[k] = e.exp_avg_sq;
      max_exp_avg_sq[k] = e.max_exp_avg_sq;
      extra[k] = e.extra;
    }
  }

  __device__ __forceinline__ void store(const AdamTensor& t, int64_t i) const {
    store_some(static_cast<Param*>(t.parameter) + i, parameter);
    if constexpr (kHasFirstMoment<Rule>) store_some(static_cast<State*>(t.exp_avg) + i, exp_avg);
    if constexpr (Rule::kSecondMoment) store_some(static_cast<State*>(t.exp_avg_sq) + i, exp_avg_sq);
    if constexpr (Rule::kMaxMoment) store_some(static_cast<State*>(t.max_exp_avg_sq) + i, max_exp_avg_sq);
    if constexpr (Types::kHasExtra) store_some(static_cast<Extra*>(t.master_or_remainder) + i, extra);
  }
};

// The same elements a warp has with packets of eight, as two rows of four a thread: where moments are fp32,
// the 16 bytes of neighbouring threads then lie side by side, and no access leaves half of a sector behind.
// The threads of a warp share their draws.
template <class Rule, AdamStorage kStorage>
struct ElementRows {
  using Row = ElementPacket<Rule, kStorage, 4>;
  using Real = typename Row::Real;
  Row rows[kWarpRows];

  __device__ static bool is_aligned(const AdamTensor& t, const void* g) { return Row::is_aligned(t, g); }

  // `i` is the warp's first element, here and below.
  __device__ __forceinline__ void load(const AdamTensor& t, const void* g, int64_t i) {
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) rows[row].load(t, g, i + in_row(row));
  }

  __device__ __forceinline__ void step(const AdamScalars<Real>& scalars, int64_t real_index) {
    uint32_t random16[kWarpRows][4];
    draw_random16_of_rows<kStorage>(scalars, real_index, random16);
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) rows[row].step(scalars, random16[row]);
  }

  __device__ __forceinline__ void store(const AdamTensor& t, int64_t i) const {
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) rows[row].store(t, i + in_row(row));
  }
};

template <class Rule, AdamStorage kStorage>
__global__ void __launch_bounds__(ElementPolicy<kStorage>::kThreads,
                                  Rule::kMaxMoment ? 0 : ElementPolicy<kStorage>::kBlocks)
    element_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                   const AdamGradient* __restrict__ gradients, const StepScalars* group_scalars) {
  constexpr int kMine = kPacket<kStorage>;
  constexpr bool kInRows = ElementPolicy<kStorage>::kInRows;
  using Full = std::conditional_t<kInRows, ElementRows<Rule, kStorage>, ElementPacket<Rule, kStorage, kMine>>;
  using Single = ElementPacket<Rule, kStorage, 1>;

  const auto [tile, index, lane] = my_tile<ElementPolicy<kStorage>::kThreads>(table);
  const AdamGradient gradient = gradients[tile.tensor];
  const AdamTensor tensor = tensors[tile.tensor];
  const int count = gradient.gradient == nullptr ? 0 : static_cast<int>(tile.count);
  // What is worked on together: a thread's packet, or a warp's rows.
  constexpr int kTogether = kInRows ? kWarp : 1;
  constexpr int kElements = kTogether * kMine;
  const int first = lane / kTogether * kElements;
  const bool whole = first + kElements <= count && Full::is_aligned(tensor, gradient.gradient);
  Full packet;
  if (whole) packet.load(tensor, gradient.gradient, tile.offset + first);

  wait_for_previous_kernel();  // by every thread, so that this kernel never ends before the one ahead of it
  if (count == 0) return;
  // A reference, not a copy: registers are what limits the blocks in flight.
  const auto& scalars = group_scalars[gradient.scalars].template as<AdamScalars<typename Full::Real>>();
  if (scalars.skip) return;
  if (whole) {
    packet.step(scalars, tensor.first_element + tile.offset + first);
    packet.store(tensor, tile.offset + first);
    return;
  }
#pragma unroll 1
  for (int k = first + lane % kTogether; k < count && k < first + kElements; k += kTogether) {
    Single single;
    single.load(tensor, gradient.gradient, tile.offset + k);
    single.step(scalars, tensor.first_element + tile.offset + k);
    single.store(tensor, tile.offset + k);
  }
}

// The same for rows that are visible. A packet without such a row is neither read nor written; of others the elements
// of other rows are written as they were. A block looks at the rows of several tiles first, because most tiles have
// little to do, and then shares the packets that are left among its threads.
template <class Rule, AdamStorage kStorage>
__global__ void __launch_bounds__(ElementPolicy<kStorage>::kThreads)
    visible_rows_kernel(const AdamTiles table, const RowMask* __restrict__ masks,
                        const AdamTensor* __restrict__ tensors, const AdamGradient* __restrict__ gradients,
                        const StepScalars* group_scalars) {
  constexpr int kMine = kPacket<kStorage>;
  using Full = ElementPacket<Rule, kStorage, kMine>;
  using Single = ElementPacket<Rule, kStorage, 1>;
  __shared__ VisiblePackets<ElementPolicy<kStorage>::kThreads, kMine> packets;
  packets.find(table, masks, gradients);

  wait_for_previous_kernel();  // by every thread, as in element_kernel
  for (int i = threadIdx.x; i < packets.last(); i += ElementPolicy<kStorage>::kThreads) {
    const auto [tile, begin, count, which] = packets.at(packets.number(i));
    if (which == 0) continue;
    const AdamTensor tensor = tensors[tile.tensor];
    const AdamGradient gradient = gradients[tile.tensor];
    const int64_t first = tile.offset + begin;
    const auto& scalars = group_scalars[gradient.scalars].template as<AdamScalars<typename Full::Real>>();
    if (scalars.skip) continue;
    if (count == kMine && Full::is_aligned(tensor, gradient.gradient)) {
      Full packet;
      packet.load(tensor, gradient.gradient, first);
      uint32_t random16[kMine] = {};
      draw_random16<kStorage, kMine>(scalars, tensor.first_element + first, random16);
      packet.step(scalars, random16, which);
      packet.store(tensor, first);
      continue;
    }
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      if (!(which >> k & 1)) continue;
      Single single;
      single.load(tensor, gradient.gradient, first + k);
      single.step(scalars, tensor.first_element + first + k);
      single.store(tensor, first + k);
    }
  }
}

// What adam_cuda does, with another rule. `what` names it where the launch is refused. `kHasRows`: AdamLaunch::rows may
// be there.
template <class Rule, bool kHasRows = true>
void elements_cuda(const char* what, AdamLaunch choice, const AdamTiles& tiles, const AdamTensor* tensors,
                   const AdamGradient* gradients, const StepScalars* scalars, cudaStream_t stream) {
  with_storage(choice.storage, [&](auto storage) {
    constexpr int kThreads = ElementPolicy<storage()>::kThreads;
    const unsigned blocks = blocks_for<kThreads>(tiles);
    if (blocks == 0) return;
    if constexpr (kHasRows) {
      if (choice.rows != nullptr) {
        return launch_overlapped(what, choice.follows_prologue, visible_rows_kernel<Rule, storage()>,
                                 blocks_for_rows(tiles), kThreads, stream, tiles, choice.rows, tensors,
                                 gradients, scalars);
      }
    }
    launch_overlapped(what, choice.follows_prologue, element_kernel<Rule, storage()>, blocks, kThreads,
                      stream, tiles, tensors, gradients, scalars);
  });
}

}  // namespace pacer::kernels
