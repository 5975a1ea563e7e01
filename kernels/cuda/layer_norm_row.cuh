// What the CUDA loops over rows of a layer normalisation share: pieces of eight columns in registers, sums
// over a row in the order of kernels/math/layer_norm.h, and the choice of lanes.
#pragma once

#include <type_traits>

#include <pacer/kernels/layer_norm.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/cuda/launch.cuh>

namespace pacer::kernels {

constexpr int kLayerNormPieces = 4;  // of a lane at most: up to 32 columns
static_assert(kLayerNormPieces * kLayerNormPiece * kLayerNormMostLanes == kLayerNormCudaColumns);

// Short rows have a warp each, so that a block has several of them.
template <int kLanes>
constexpr int kLayerNormThreads = kLanes == kLayerNormWarp ? 128 : kLanes;

// Eight columns as they lie in memory.
template <class T>
struct LayerNormPiece {
  static constexpr int kWords = sizeof(T) * kLayerNormPiece / sizeof(uint4);
  uint4 words[kWords];
};

// Two neighbours of 16 bits by as few instructions as can be, with the bits of load and store.
__device__ __forceinline__ float2 load_two(uint32_t word, BFloat16) {
  return make_float2(float_of(word << 16), float_of(word & 0xFFFF0000u));
}
__device__ __forceinline__ float2 load_two(uint32_t word, Float16) {
  return __half22float2(reinterpret_cast<const __half2&>(word));
}
__device__ __forceinline__ uint32_t store_two(float first, float second, BFloat16) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(two);
}
__device__ __forceinline__ uint32_t store_two(float first, float second, Float16) {
  const __half2 two = __floats2half2_rn(first, second);
  return reinterpret_cast<const uint32_t&>(two);
}

template <class T>
__device__ __forceinline__ void unpack_piece(const LayerNormPiece<T>& piece,
                                             float (&values)[kLayerNormPiece]) {
#pragma unroll
  for (int w = 0; w < piece.kWords; ++w) {
    const uint32_t words[4] = {piece.words[w].x, piece.words[w].y, piece.words[w].z, piece.words[w].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        values[4 * w + i] = float_of(words[i]);
      } else {
        const float2 two = load_two(words[i], T{});
        values[2 * i] = two.x;
        values[2 * i + 1] = two.y;
      }
    }
  }
}

template <class T>
__device__ __forceinline__ LayerNormPiece<T> pack_piece(const float (&values)[kLayerNormPiece]) {
  LayerNormPiece<T> piece;
#pragma unroll
  for (int w = 0; w < piece.kWords; ++w) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        words[i] = bits_of(values[4 * w + i]);
      } else {
        words[i] = store_two(values[2 * i], values[2 * i + 1], T{});
      }
    }
    piece.words[w] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  return piece;
}

// Reads a piece of what is read once: it leaves the caches first, in which parameters stay.
template <class T>
__device__ __forceinline__ LayerNormPiece<T> read_piece_once(const T* memory) {
  LayerNormPiece<T> piece;
#pragma unroll
  for (int w = 0; w < piece.kWords; ++w) piece.words[w] = __ldcs(reinterpret_cast<const uint4*>(memory) + w);
  return piece;
}

// Reads a piece of what no thread of the kernel writes and every row needs, as numbers.
template <class T>
__device__ __forceinline__ void read_parameter_piece(const T* memory, float (&values)[kLayerNormPiece]) {
  LayerNormPiece<T> piece;
#pragma unroll
  for (int w = 0; w < piece.kWords; ++w) piece.words[w] = __ldg(reinterpret_cast<const uint4*>(memory) + w);
  unpack_piece(piece, values);
}

template <class T>
__device__ __forceinline__ void write_piece(const LayerNormPiece<T>& piece, T* memory) {
#pragma unroll
  for (int w = 0; w < piece.kWords; ++w) reinterpret_cast<uint4*>(memory)[w] = piece.words[w];
}

// First column of piece `e` of a lane.
template <int kLanes>
__device__ __forceinline__ int piece_column(int e) {
  return (e * kLanes + static_cast<int>(threadIdx.x) % kLanes) * kLayerNormPiece;
}

// The sum of a number of each lane of a warp, in all of them: addition commutes, so that every lane adds up
// the same tree.
__device__ __forceinline__ float sum_over_warp(float value) {
#pragma unroll
  for (int h = kLayerNormWarp / 2; h >= 1; h /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, h);
  return value;
}

template <int kWarps>
__device__ __forceinline__ float fold_warps(const float (&of_warps)[kWarps]) {
  if constexpr (kWarps == 1) {
    return of_warps[0];
  } else {
    float half[kWarps / 2];
#pragma unroll
    for (int w = 0; w < kWarps / 2; ++w) half[w] = of_warps[w] + of_warps[w + kWarps / 2];
    return fold_warps(half);
  }
}

// The sums of kSums rows of accumulators over all lanes, in all lanes. `of_warps` is shared memory that no
// thread still reads.
template <int kLanes, int kSums>
__device__ __forceinline__ void sum_of_lanes(const float (&accumulators)[kSums][kLayerNormPiece],
                                             float (&of_warps)[kSums][kLanes / kLayerNormWarp],
                                             float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = sum_over_warp(sum_of_eight(accumulators[i]));
  if constexpr (kLanes > kLayerNormWarp) {
    if (threadIdx.x % kLayerNormWarp == 0) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) of_warps[i][threadIdx.x / kLayerNormWarp] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = fold_warps(of_warps[i]);
  }
}

// Adds up the parts of two matrices of partial sums (2, parts, columns), the first to `first` and the second to
// `second`, where they are wanted.
struct LayerNormParts {
  const float* partials;
  int64_t parts, columns;
  float *first, *second;
  // The kernel before it on the stream makes them, and calls let_next_kernel_start.
  bool follows_partials;
};
void sum_layer_norm_parts(const LayerNormParts& parts, cudaStream_t stream);

// Calls visit(std::integral_constant<int, lanes>{}).
template <class Visit>
void with_layer_norm_lanes(int64_t columns, const Visit& visit) {
  switch (layer_norm_lanes(columns)) {
    case 32:
      return visit(std::integral_constant<int, 32>{});
    case 64:
      return visit(std::integral_constant<int, 64>{});
    case 128:
      return visit(std::integral_constant<int, 128>{});
    case 256:
      return visit(std::integral_constant<int, 256>{});
    default:
      return visit(std::integral_constant<int, 512>{});
  }
}

inline void check_layer_norm_columns(int64_t columns) {
  require(columns % kLayerNormPiece == 0 && columns > 0 && columns <= kLayerNormCudaColumns,
          "layer normalisation on a GPU needs columns that are a multiple of ", kLayerNormPiece, ", at most ",
          kLayerNormCudaColumns, ", not ", columns, "; pad the rows or use the CPU");
}

template <class... Pointers>
void check_layer_norm_memory(const Pointers*... pointers) {
  require((is_aligned(pointers) && ...),
          "layer normalisation on a GPU needs memory that begins at a multiple of 16 bytes; copy the tensor");
}

// Blocks of kThreads threads that have kLanes each for `count` rows or parts.
template <int kLanes>
unsigned layer_norm_blocks(int64_t count) {
  const int64_t blocks = ceil_divide(count, kLayerNormThreads<kLanes> / kLanes);
  require(blocks < (int64_t{1} << 31),
          "more than 2^31 rows in one layer normalisation; split them over several");
  return static_cast<unsigned>(blocks);
}

}  // namespace pacer::kernels
