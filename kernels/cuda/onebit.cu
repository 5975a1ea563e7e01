// The CUDA side of a 1-bit exchange: what is compressed as it lies in memory, the mean over ranks that a
// server compresses, scales and headers, and what came back. Bytes per element in fp32: values 12.1, the
// server W / 8 + 8.1 of its chunk, decoding 4.1.
#include <pacer/kernels/onebit.h>

#include <type_traits>

#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/cuda/onebit_compress.cuh>

namespace pacer::kernels {
namespace {

// One tensor, which the buffer's real elements are.
struct ValuesSource {
  const float* values;
  bool aligned;

  static constexpr int kBlocks = 3, kRowsAtOnce = 2;
  using Kept = NothingKept;
  __device__ __forceinline__ Kept begin() const { return {}; }
  struct Granule {
    const float* values;
  };
  struct Raw {
    float values[kMine];
  };
  __device__ __forceinline__ Granule granule(uint32_t /*tensor*/, int64_t position) const {
    return {values + position};
  }
  __device__ __forceinline__ Raw fetch(const Granule& granule, int real, int lane) const {
    Raw raw{};
    const int first = lane * kMine;
    if (aligned && first + kMine <= real) {
      load_packet(granule.values + first, raw.values);
    } else {
#pragma unroll
      for (int k = 0; k < kMine; ++k) raw.values[k] = first + k < real ? granule.values[first + k] : 0.0f;
    }
    return raw;
  }
  __device__ __forceinline__ void read(const Kept&, const Granule&, const Raw& raw, int, int64_t,
                                       float (&values)[kMine]) const {
#pragma unroll
    for (int k = 0; k < kMine; ++k) values[k] = raw.values[k];
  }
};

// The mean of all ranks' signs of one chunk, added in rank order. kWorld: the ranks where that is known,
// whose signs are fetched ahead, a nibble each, and whose weights are kept, or those of a row where each has
// its own; 0 for any number.
template <int kWorld, bool kRowsScaled>
struct MeanSource {
  OneBitMessages parts;
  float average;  // (float)(1 / ranks)

  static constexpr int kBlocks = kWorld == 0 ? 2 : kWorld <= 4 ? 4 : 3, kRowsAtOnce = 1;
  static_assert(kWorld <= 8);
  struct Granule {
    const unsigned char* signs;  // of rank 0
    float weights[kRowsScaled && kWorld > 0 ? kWorld : 1];
  };
  struct Raw {
    uint32_t nibbles;
  };
  struct Kept {
    float weights[!kRowsScaled && kWorld > 0 ? kWorld : 1];
  };

  __device__ __forceinline__ float weight_of(int64_t rank, int64_t i) const {
    return mul_(scale_of(parts, rank, i), average);
  }
  __device__ __forceinline__ Kept begin() const {
    Kept kept{};
    if constexpr (!kRowsScaled) {
#pragma unroll
      for (int rank = 0; rank < kWorld; ++rank) kept.weights[rank] = weight_of(rank, 0);
    }
    return kept;
  }
  __device__ __forceinline__ Granule granule(uint32_t /*tensor*/, int64_t position) const {
    Granule granule{signs_of(parts, 0) + position / 8};
    if constexpr (kRowsScaled) {
#pragma unroll
      for (int rank = 0; rank < kWorld; ++rank) granule.weights[rank] = weight_of(rank, position);
    }
    return granule;
  }
  __device__ __forceinline__ Raw fetch(const Granule& granule, int /*real*/, int lane) const {
    Raw raw{};
    const unsigned char* signs = granule.signs;
#pragma unroll
    for (int rank = 0; rank < kWorld; ++rank, signs += parts.stride) {
      raw.nibbles |= nibble_of(signs, lane) << (4 * rank);
    }
    return raw;
  }
  static __device__ __forceinline__ void add(bool first, uint32_t nibble, float weight,
                                             float (&values)[kMine]) {
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const float part = decode_sign((nibble >> k) & 1u, weight);
      values[k] = first ? part : values[k] + part;
    }
  }
  __device__ __forceinline__ void read(const Kept& kept, const Granule& granule, const Raw& raw, int lane,
                                       int64_t i, float (&values)[kMine]) const {
    if constexpr (kWorld > 0) {
#pragma unroll
      for (int rank = 0; rank < kWorld; ++rank) {
        const float weight = kRowsScaled ? granule.weights[rank] : kept.weights[rank];
        add(rank == 0, raw.nibbles >> (4 * rank), weight, values);
      }
    } else {
#pragma unroll 4
      for (int64_t rank = 0; rank < parts.world_size; ++rank) {
        add(rank == 0, nibble_of(granule.signs + rank * parts.stride, lane), weight_of(rank, i), values);
      }
    }
  }
};

__global__ void __launch_bounds__(kPartialColumns)
    finish_side_kernel(const OneBitCudaSide side, int64_t units, const OneBitCall call,
                       const OneBitControl control) {
  if (stands_still(control)) return;
  __shared__ float shared_scale;
  const double sum = sum_partials_by_block(side.sums, units);
  if (threadIdx.x == 0) {
    if (side.rows_scaled) {
      shared_scale = static_cast<float>(sum);
    } else {
      shared_scale = side.scales[0] = onebit_scale(side.norm, sum, side.real_elements);
    }
  }
  __syncthreads();
  const OneBitHeader header{shared_scale, static_cast<uint32_t>(call.step), call.sequence,
                            side.rows_scaled ? 1u : 0u};
  for (int64_t i = threadIdx.x; i < side.message_count; i += kPartialColumns) {
    *reinterpret_cast<OneBitHeader*>(side.messages + i * side.stride) = header;
  }
}

// One thread, so that of several failures the first is noted.
__global__ void check_messages_kernel(const OneBitMessages messages, const OneBitCall call, bool as_mean,
                                      const OneBitControl control) {
  if (stands_still(control)) return;
  OneBitStatus status = *control.status;
  for (int64_t rank = 0; rank < messages.world_size && status.failure == OneBitFailure::none; ++rank) {
    const auto header = *reinterpret_cast<const OneBitHeader*>(messages.data + rank * messages.stride);
    status.rank = static_cast<uint32_t>(rank);
    status.step = header.step;
    status.sequence = header.sequence;
    if (header.step != static_cast<uint32_t>(call.step) || header.sequence != call.sequence ||
        header.rows_scaled != (messages.rows_scaled ? 1u : 0u)) {
      status.failure = OneBitFailure::other_call;
    } else if (as_mean && !is_finite_scale(header.scale)) {
      status.failure = OneBitFailure::not_finite;
    }
  }
  if (as_mean && status.failure == OneBitFailure::none) status.has_mean = 1;
  *control.status = status;
}

__global__ void forget_mean_kernel(const OneBitControl control) {
  if (!stands_still(control)) control.status->has_mean = 0;
}

constexpr int kDecodeThreads = 128;

__global__ void __launch_bounds__(kDecodeThreads)
    decode_kernel(const OneBitMessages messages, int64_t count, bool aligned, float* values,
                  const OneBitControl control) {
  if (stands_still(control)) return;
  const int lane = threadIdx.x % 32;
  const int64_t position = (blockIdx.x * static_cast<int64_t>(kDecodeThreads) + threadIdx.x - lane) * kMine;
  if (position >= count) return;
  const SignedGranule granule = signed_granule(messages, position);
  const uint32_t nibble = nibble_of(granule.signs, lane);
  const int64_t i = position + lane * kMine;
  float four[kMine];
#pragma unroll
  for (int k = 0; k < kMine; ++k) four[k] = decode_sign((nibble >> k) & 1u, granule.scale);
  if (aligned && i + kMine <= count) {
    store_packet(values + i, four);
  } else {
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      if (i + k < count) values[i + k] = four[k];
    }
  }
}

}  // namespace

void onebit_compress_values_cuda(const OneBitCudaSide& side, const float* values,
                                 const OneBitControl& control, Stream stream) {
  launch_compress("the compression of a buffer", side, ValuesSource{values, is_aligned(values)}, control,
                  stream);
}

void onebit_compress_mean_cuda(const OneBitCudaSide& side, const OneBitMessages& parts,
                               const OneBitControl& control, Stream stream) {
  const auto average = static_cast<float>(1.0 / static_cast<double>(parts.world_size));
  const auto launch = [&](auto world_size, auto rows_scaled) {
    const MeanSource<decltype(world_size)::value, decltype(rows_scaled)::value> source{parts, average};
    launch_compress("the compression of a mean", side, source, control, stream);
  };
  const auto launch_for = [&](auto world_size) {
    parts.rows_scaled ? launch(world_size, std::true_type{}) : launch(world_size, std::false_type{});
  };
  switch (parts.world_size) {
    case 2:
      return launch_for(std::integral_constant<int, 2>{});
    case 4:
      return launch_for(std::integral_constant<int, 4>{});
    case 8:
      return launch_for(std::integral_constant<int, 8>{});
    default:
      return launch_for(std::integral_constant<int, 0>{});
  }
}

void onebit_finish_side_cuda(const OneBitCudaSide& side, const OneBitCall& call, const OneBitControl& control,
                             Stream stream) {
  finish_side_kernel<<<1, kPartialColumns, 0, stream>>>(side, ceil_divide(side.extent, kReductionUnit), call,
                                                        control);
  check_launch("the scales of a 1-bit exchange");
}

void onebit_check_messages_cuda(const OneBitMessages& messages, const OneBitCall& call, bool as_mean,
                                const OneBitControl& control, Stream stream) {
  check_messages_kernel<<<1, 1, 0, stream>>>(messages, call, as_mean, control);
  check_launch("the check of a 1-bit exchange");
}

void onebit_forget_mean_cuda(const OneBitControl& control, Stream stream) {
  forget_mean_kernel<<<1, 1, 0, stream>>>(control);
  check_launch("a dense step of a 1-bit exchange");
}

void onebit_decode_cuda(const OneBitMessages& messages, int64_t count, float* values,
                        const OneBitControl& control, Stream stream) {
  if (count == 0) return;
  const int64_t blocks = ceil_divide(count, kDecodeThreads * kMine);
  require(blocks < (int64_t{1} << 31), "a 1-bit exchange on a GPU takes up to 2^38 elements");
  decode_kernel<<<static_cast<unsigned>(blocks), kDecodeThreads, 0, stream>>>(
      messages, count, is_aligned(values), values, control);
  check_launch("the decoding of a 1-bit exchange");
}

}  // namespace pacer::kernels
