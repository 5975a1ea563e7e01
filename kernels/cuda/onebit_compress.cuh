// The compressing kernel of a 1-bit exchange, for any source of values. One block per reduction unit (16 rows
// of 2,048 elements): a thread owns four neighbouring columns, so that a row is one 16-byte access a thread
// and one granule of 128 elements a warp, in which lie elements of one tensor only. What a warp has to know
// of its granules is worked out once, by half of its lanes, and lies in shared memory. Deterministic: no
// atomics, partial sums in fixed places, the order of core/reduction_order.h.
//
// A source has
//   kBlocks                                    thread blocks on a multiprocessor, which bounds registers
//   kRowsAtOnce                                rows whose loads are in flight
//   Granule                                    what it must know of 128 elements
//   granule(tensor, position)                  of those from element `position` of the side on
//   Raw, fetch(granule, real, lane)            a lane's four of them as they come from memory, of which only
//                                              the granule's first `real` may be touched
//   Kept, begin()                              what a thread keeps in registers all along
//   read(kept, granule, raw, lane, i, values)  four elements as values; the first is element i of the side
#pragma once

#include <cmath>
#include <cstdint>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/kernels/onebit.h>
#include <pacer/kernels/cuda/fold.cuh>
#include <pacer/kernels/cuda/launch.cuh>

namespace pacer::kernels {

constexpr int kMine = 4;                                               // elements of a thread in a row
constexpr int kRowThreads = static_cast<int>(kOneBitRow) / kMine;      // 512
constexpr int kGranule = static_cast<int>(kOneBitAlignment);           // elements of a warp in a row
constexpr int kRowGranules = static_cast<int>(kOneBitRow) / kGranule;  // 16: warps of a block
constexpr int kUnitRows = static_cast<int>(kOneBitUnitRows);           // 16

__device__ __forceinline__ bool stands_still(const OneBitControl& control) {
  return (control.check != nullptr && control.check->non_finite != 0) ||
         (control.status != nullptr && control.status->failure != OneBitFailure::none);
}

// ---- Messages ----

__device__ __forceinline__ const unsigned char* signs_of(const OneBitMessages& messages, int64_t number) {
  return messages.data + (number + 1) * messages.stride - messages.chunk / 8;
}

// Scales are not negative.
__device__ __forceinline__ bool is_finite_scale(float scale) { return scale <= 3.402823466e38f; }

// The scale of the row in which element `inside` of a message lies.
__device__ __forceinline__ float scale_of(const OneBitMessages& messages, int64_t number, int64_t inside) {
  const unsigned char* message = messages.data + number * messages.stride;
  if (!messages.rows_scaled) return reinterpret_cast<const OneBitHeader*>(message)->scale;
  return reinterpret_cast<const float*>(message + sizeof(OneBitHeader))[inside / kOneBitRow];
}

// The signs of four elements from lane `lane` of 32, each of whom has four, on; bit k is that of element k.
__device__ __forceinline__ uint32_t nibble_of(const unsigned char* signs, int lane) {
  return (signs[lane / 2] >> (4 * (lane % 2))) & 15u;
}

// Where 128 elements of the buffer whose chunk k is message k have their signs and scale.
struct SignedGranule {
  const unsigned char* signs;
  float scale;
};
__device__ __forceinline__ SignedGranule signed_granule(const OneBitMessages& messages, int64_t position) {
  // In granules, so that the division is one of 32 bits.
  const auto granule = static_cast<uint32_t>(position / kGranule);
  const auto chunk_granules = static_cast<uint32_t>(messages.chunk / kGranule);
  const uint32_t number = granule / chunk_granules;
  const int64_t inside = static_cast<int64_t>(granule - number * chunk_granules) * kGranule;
  return {signs_of(messages, number) + inside / 8, scale_of(messages, number, inside)};
}

// ---- One side ----

struct NothingKept {};

template <class Source>
struct SideGranule {
  typename Source::Granule source;
  unsigned char* signs;
  int real;     // elements, from the granule's first on; -1: beyond the side
  float scale;  // with which they were rounded before
};

template <bool kRowsScaled, class Source>
__device__ __forceinline__ SideGranule<Source> side_granule(const OneBitCudaSide& side, const Source& source,
                                                            int64_t position) {
  SideGranule<Source> granule{};
  granule.real = -1;
  if (position >= side.extent) return granule;
  const uint32_t tensor = side.tensors[(side.origin + position) / kGranule];
  const int64_t left = side.ends[tensor] - side.origin - position;
  granule.real = static_cast<int>(left < 0 ? 0 : left < kGranule ? left : kGranule);
  const auto number =
      static_cast<uint32_t>(position / kGranule) / static_cast<uint32_t>(side.chunk / kGranule);
  const int64_t inside = position - number * side.chunk;
  granule.signs = side.messages + (number + 1) * side.stride - side.chunk / 8 + inside / 8;
  granule.source = source.granule(tensor, position);
  granule.scale = side.scales[kRowsScaled ? position / kOneBitRow : 0];
  return granule;
}

// Eight lanes have the signs of 32 consecutive elements, a word, which every fourth of them would have.
__device__ __forceinline__ void store_signs(uint32_t nibble, int lane, unsigned char* signs) {
  uint32_t word = nibble << (4 * (lane % 8));
#pragma unroll
  for (int h = 1; h < 8; h *= 2) word |= __shfl_xor_sync(0xFFFFFFFFu, word, h);
  if (lane % 8 == 0) reinterpret_cast<uint32_t*>(signs)[lane / 8] = word;
}

// Rows whose sums are folded at once, by a warp each: as many as shared memory has room for.
constexpr int kFoldRows = 8;

// A warp's own row: the fold of core/reduction_order.h, then its scale, for the next call and into the
// message. Returns whether the scale is finite.
template <ScaleNorm kNorm, class Granule>
__device__ __forceinline__ bool finish_row(const OneBitCudaSide& side,
                                           const Granule (&granules)[kRowGranules], int row,
                                           const float (&fours)[kRowThreads]) {
  const int64_t position = blockIdx.x * kReductionUnit + row * kOneBitRow;
  if (position >= side.extent) return true;  // for all lanes
  constexpr int kHalf = kRowThreads / 2;
  const int lane = threadIdx.x % 32;
  float sums[kHalf / 32];
#pragma unroll
  for (int k = 0; k < kHalf / 32; ++k) sums[k] = fours[k * 32 + lane] + fours[kHalf + k * 32 + lane];
#pragma unroll
  for (int h = kHalf / 64; h >= 1; h /= 2) {
#pragma unroll
    for (int k = 0; k < h; ++k) sums[k] += sums[k + h];
  }
  const float sum = fold_warp(sums[0]);
  const int real = fold_warp(lane < kRowGranules ? max(granules[lane].real, 0) : 0);
  if (lane != 0) return true;
  const float scale = onebit_scale(kNorm, static_cast<double>(sum), real);
  side.scales[position / kOneBitRow] = scale;
  const int64_t number = position / side.chunk, inside = position - number * side.chunk;
  reinterpret_cast<float*>(side.messages + number * side.stride + sizeof(OneBitHeader))[inside / kOneBitRow] =
      scale;
  return is_finite_scale(scale);
}

template <ScaleNorm kNorm, bool kRowsScaled, class Source>
__global__ void __launch_bounds__(kRowThreads, Source::kBlocks)
    compress_kernel(const OneBitCudaSide side, const Source source, const OneBitControl control) {
  if (stands_still(control)) return;
  __shared__ SideGranule<Source> granules[kUnitRows][kRowGranules];
  __shared__ float fours[kRowsScaled ? kFoldRows : 1][kRowThreads];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t begin = blockIdx.x * kReductionUnit;
  if (lane < kUnitRows) {
    granules[lane][warp] =
        side_granule<kRowsScaled>(side, source, begin + lane * kOneBitRow + warp * kGranule);
  }
  const typename Source::Kept kept = source.begin();
  __syncwarp();

  float columns[kMine] = {};
  bool finite = true;
#pragma unroll 1
  for (int first = 0; first < kUnitRows; first += Source::kRowsAtOnce) {
    typename Source::Raw raw[Source::kRowsAtOnce];
    float carried[Source::kRowsAtOnce][kMine];
#pragma unroll
    for (int r = 0; r < Source::kRowsAtOnce; ++r) {
      const SideGranule<Source>& granule = granules[first + r][warp];
      if (granule.real < 0) continue;
      raw[r] = source.fetch(granule.source, granule.real, lane);
      load_packet(side.carried + begin + (first + r) * kOneBitRow + threadIdx.x * kMine, carried[r]);
    }
#pragma unroll
    for (int r = 0; r < Source::kRowsAtOnce; ++r) {
      const int row = first + r;
      const SideGranule<Source>& granule = granules[row][warp];
      if (granule.real >= 0) {  // the same for all lanes
        const int real = granule.real - lane * kMine;
        float values[kMine];
        source.read(kept, granule.source, raw[r], lane, begin + row * kOneBitRow + threadIdx.x * kMine,
                    values);
        uint32_t nibble = 0;
#pragma unroll
        for (int k = 0; k < kMine; ++k) {
          const float value = k < real ? values[k] + onebit_error(carried[r][k], granule.scale) : 0.0f;
          carried[r][k] = value;
          nibble |= (value < 0 ? 0u : 1u) << k;
          columns[k] = add_to_scale(kNorm, value, columns[k]);
        }
        store_packet(side.carried + begin + row * kOneBitRow + threadIdx.x * kMine, carried[r]);
        store_signs(nibble, lane, granule.signs);
      }
      if constexpr (kRowsScaled) {
        fours[row % kFoldRows][threadIdx.x] = (columns[0] + columns[1]) + (columns[2] + columns[3]);
#pragma unroll
        for (int k = 0; k < kMine; ++k) columns[k] = 0;
      }
    }
    if constexpr (kRowsScaled) {
      const int end = first + Source::kRowsAtOnce;
      if (end % kFoldRows == 0) {
        const int row = end - kFoldRows + warp;
        __syncthreads();
        if (warp < kFoldRows) finite &= finish_row<kNorm>(side, granules[row], row, fours[warp]);
        __syncthreads();  // before `fours` is written again
      }
    }
  }
  if constexpr (kRowsScaled) {
    finite = __syncthreads_and(finite);
    if (threadIdx.x == 0) side.sums[blockIdx.x] = finite ? 0.0 : NAN;
  } else {
    fours[0][threadIdx.x] = (columns[0] + columns[1]) + (columns[2] + columns[3]);
    const float sum = fold_block<kRowThreads>(fours[0]);
    if (threadIdx.x == 0) side.sums[blockIdx.x] = static_cast<double>(sum);
  }
}

template <class Source>
void launch_compress(const char* what, const OneBitCudaSide& side, const Source& source,
                     const OneBitControl& control, cudaStream_t stream) {
  const int64_t units = ceil_divide(side.extent, kReductionUnit);
  require(units < (int64_t{1} << 31) && side.extent < (int64_t{1} << 38),
          "a 1-bit exchange on a GPU takes up to 2^38 elements");
  if (units == 0) return;
  constexpr auto rms = ScaleNorm::rms, l1 = ScaleNorm::l1;
  const auto kernel =
      side.rows_scaled
          ? (side.norm == rms ? compress_kernel<rms, true, Source> : compress_kernel<l1, true, Source>)
          : (side.norm == rms ? compress_kernel<rms, false, Source> : compress_kernel<l1, false, Source>);
  kernel<<<static_cast<unsigned>(units), kRowThreads, 0, stream>>>(side, source, control);
  check_launch(what);
}

}  // namespace pacer::kernels
