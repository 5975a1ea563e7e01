// The CUDA loop of the Adam kernels. One short-lived thread block per tile and no persistent grid: every
// thread issues all its loads, then computes, then stores (1 iteration per thread reaches 99 % of copy
// bandwidth, 4 iterations 97 %, a persistent grid 93 %, on an H200). Tiles of tiny tensors are worked on by
// one warp each. Cost: each stream of adam_storage.h once, plus 16 B of tile table per tile. Deterministic:
// elements are independent.
#include <pacer/kernels/adam.h>

#include <type_traits>

#include <pacer/kernels/math/lamb.h>
#include <pacer/kernels/cuda/packet.cuh>

namespace pacer::kernels {
namespace {

// How the loop over a dtype set is cut, and how many blocks a multiprocessor must hold, which bounds
// registers. Measured on an H100, of copy bandwidth for GPT-2's tensors: 64 threads instead of 128 give pure
// bf16 .962 instead of .955 and nothing to the others; two rows a warp instead of packets of eight give
// stochastic rounding .965 instead of .946, and 7 blocks (72 registers, not 80) .980; 8 blocks spill, .893. A
// bound that makes others spill costs 4 to 18 points.
template <AdamStorage kStorage>
struct Policy {
  static constexpr int kThreads = kStorage == AdamStorage::bf16 ? 64 : 128;
  static constexpr bool kInRows = kStorage == AdamStorage::bf16_stochastic;
  static constexpr int kBlocks = kInRows ? 7 : 0;  // 0: no bound
};

// N consecutive elements in registers.
template <AdamStorage kStorage, bool kAmsgrad, int N>
struct Packet {
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
                   is_packet_aligned<Param, N>(static_cast<const Param*>(t.parameter)) &&
                   is_packet_aligned<State, N>(static_cast<const State*>(t.exp_avg)) &&
                   is_packet_aligned<State, N>(static_cast<const State*>(t.exp_avg_sq));
    if constexpr (kAmsgrad) {
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
    load_some(static_cast<const State*>(t.exp_avg) + i, exp_avg);
    load_some(static_cast<const State*>(t.exp_avg_sq) + i, exp_avg_sq);
    if constexpr (kAmsgrad) load_some(static_cast<const State*>(t.max_exp_avg_sq) + i, max_exp_avg_sq);
    if constexpr (Types::kHasExtra) load_some(static_cast<const Extra*>(t.master_or_remainder) + i, extra);
  }

  __device__ __forceinline__ void step(const AdamScalars<Real>& scalars, int64_t real_index) {
    uint32_t random16[N] = {};
    draw_random16<kStorage, N>(scalars, real_index, random16);
    step(scalars, random16);
  }

  __device__ __forceinline__ void step(const AdamScalars<Real>& scalars, const uint32_t (&random16)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      StoredElement<kStorage> e{gradient[k],   parameter[k],      exp_avg[k],
                                exp_avg_sq[k], max_exp_avg_sq[k], extra[k]};
      adam_step<kStorage, kAmsgrad>(e, scalars, scalars.decay_mode, random16[k]);
      parameter[k] = e.parameter;
      exp_avg[k] = e.exp_avg;
      exp_avg_sq[k] = e.exp_avg_sq;
      max_exp_avg_sq[k] = e.max_exp_avg_sq;
      extra[k] = e.extra;
    }
  }

  __device__ __forceinline__ void store(const AdamTensor& t, int64_t i) const {
    store_some(static_cast<Param*>(t.parameter) + i, parameter);
    store_some(static_cast<State*>(t.exp_avg) + i, exp_avg);
    store_some(static_cast<State*>(t.exp_avg_sq) + i, exp_avg_sq);
    if constexpr (kAmsgrad) store_some(static_cast<State*>(t.max_exp_avg_sq) + i, max_exp_avg_sq);
    if constexpr (Types::kHasExtra) store_some(static_cast<Extra*>(t.master_or_remainder) + i, extra);
  }
};

// The same elements a warp has with packets of eight, as two rows of four a thread: where moments are fp32,
// the 16 bytes of neighbouring threads then lie side by side, and no access leaves half of a sector behind.
// The threads of a warp share their draws.
template <AdamStorage kStorage, bool kAmsgrad>
struct Rows {
  using Row = Packet<kStorage, kAmsgrad, 4>;
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

template <AdamStorage kStorage, bool kAmsgrad>
__global__ void __launch_bounds__(Policy<kStorage>::kThreads, kAmsgrad ? 0 : Policy<kStorage>::kBlocks)
    adam_kernel(const AdamTiles table, const AdamTensor* __restrict__ tensors,
                const AdamGradient* __restrict__ gradients, const StepScalars* group_scalars) {
  constexpr int kMine = kPacket<kStorage>;
  constexpr bool kInRows = Policy<kStorage>::kInRows;
  using Full = std::conditional_t<kInRows, Rows<kStorage, kAmsgrad>, Packet<kStorage, kAmsgrad, kMine>>;
  using Single = Packet<kStorage, kAmsgrad, 1>;

  const auto [tile, index, lane] = my_tile<Policy<kStorage>::kThreads>(table);
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

constexpr int kPrologueThreads = 32;

// One thread per step group. The update may start loading meanwhile.
__global__ void prologue_kernel(const StepGroup* groups, int64_t count, int64_t* steps, StepScalars* scalars,
                                const GradientCheck* check) {
  let_next_kernel_start();
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  StepGroup group = groups[i];
  const bool skip = !group.active || (check != nullptr && check->non_finite != 0);
  if (check != nullptr) group.settings.factor = mul_(check->factor, group.settings.factor);
  const int64_t step = steps[i] + 1;
  if (!skip) steps[i] = step;
  const auto write = [&](auto value) {
    value.skip = skip;
    scalars[i].set(value);
  };
  const bool lamb = group.settings.rule == UpdateRule::lamb;
  if (group.is_double) {
    lamb ? write(lamb_scalars<double>(group.settings, step))
         : write(adam_scalars<double>(group.settings, step));
  } else {
    lamb ? write(lamb_scalars<float>(group.settings, step))
         : write(adam_scalars<float>(group.settings, step));
  }
}

__global__ void factor_kernel(const StepScalars* scalars, int64_t count, const double* factor,
                              StepScalars* replaced) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) replaced[i] = with_factor(scalars[i], *factor);
}

template <AdamStorage kStorage>
void launch(AdamLaunch choice, const AdamTiles& tiles, const AdamTensor* tensors,
            const AdamGradient* gradients, const StepScalars* scalars, cudaStream_t stream) {
  constexpr int kThreads = Policy<kStorage>::kThreads;
  const unsigned blocks = blocks_for<kThreads>(tiles);
  if (blocks == 0) return;
  const auto kernel = choice.amsgrad ? adam_kernel<kStorage, true> : adam_kernel<kStorage, false>;
  launch_overlapped("the Adam update", choice.follows_prologue, kernel, blocks, kThreads, stream, tiles,
                    tensors, gradients, scalars);
}

}  // namespace

int64_t adam_cuda_block_tile(AdamStorage storage) {
  return with_storage(storage,
                      [](auto chosen) -> int64_t { return Policy<chosen()>::kThreads * kPacket<chosen()>; });
}
int64_t adam_cuda_warp_tile(AdamStorage storage) {
  return with_storage(storage, [](auto chosen) -> int64_t { return kWarp * kPacket<chosen()>; });
}

void adam_cuda(AdamLaunch choice, const AdamTiles& tiles, const AdamTensor* tensors,
               const AdamGradient* gradients, const StepScalars* scalars, Stream stream) {
  with_storage(choice.storage,
               [&](auto chosen) { launch<chosen()>(choice, tiles, tensors, gradients, scalars, stream); });
}

void adam_prologue_cuda(const StepGroup* groups, int64_t count, int64_t* steps, StepScalars* scalars,
                        const GradientCheck* check, Stream stream) {
  if (count == 0) return;
  prologue_kernel<<<static_cast<unsigned>(ceil_divide(count, kPrologueThreads)), kPrologueThreads, 0,
                    stream>>>(groups, count, steps, scalars, check);
  check_launch("the Adam prologue");
}

void replace_factor_cuda(const StepScalars* scalars, int64_t count, const double* factor,
                         StepScalars* replaced, Stream stream) {
  if (count == 0) return;
  factor_kernel<<<static_cast<unsigned>(ceil_divide(count, kPrologueThreads)), kPrologueThreads, 0, stream>>>(
      scalars, count, factor, replaced);
  check_launch("the factor of a step");
}

}  // namespace pacer::kernels
