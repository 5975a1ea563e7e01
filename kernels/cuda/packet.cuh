// What the CUDA loops over Adam dtype sets share: packets of elements, the random bits of their rounding, and
// which tile a thread works on.
#pragma once

#include <cstdint>

#include <pacer/core/tile.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/cuda/launch.cuh>

namespace pacer::kernels {

// Elements per thread, loaded and stored as one packet: 4, or 8 where everything is 16-bit (16-byte accesses)
// or where eight elements share a random draw.
template <AdamStorage kStorage>
constexpr int kPacket = kStorage == AdamStorage::bf16 || kStorage == AdamStorage::bf16_stochastic ? 8 : 4;

template <class T, int N>
__device__ __forceinline__ void load_some(const T* memory, T (&values)[N]) {
  if constexpr (N == 1) {
    values[0] = memory[0];
  } else {
    load_packet(memory, values);
  }
}
template <class T, int N>
__device__ __forceinline__ void store_some(T* memory, const T (&values)[N]) {
  if constexpr (N == 1) {
    memory[0] = values[0];
  } else {
    store_packet(memory, values);
  }
}

// Enqueues the copy of one packet from global to shared memory, which holds no registers meanwhile; both
// aligned as for load_packet. The copies of a thread are visible to it after wait_for_copies.
template <class T, int N>
__device__ __forceinline__ void copy_packet_async(const T* global, T (&shared)[N]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr int kBytes = static_cast<int>(kPacketAlignment<T, N>);
  static_assert(sizeof(shared) == kBytes && (kBytes == 4 || kBytes == 8 || kBytes == 16));
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes) : "memory");
  }
#else
  load_packet(global, shared);
#endif
}
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// 16 random bits for each of N elements from real index `first` on; nothing where the dtype set draws none.
template <AdamStorage kStorage, int N, class Scalars>
__device__ __forceinline__ void draw_random16(const Scalars& scalars, int64_t first,
                                              uint32_t (&random16)[N]) {
  if constexpr (kStorage == AdamStorage::bf16_stochastic) {
    PhiloxCounter draw = rounding_draw(scalars.seed, scalars.step, first / kElementsPerDraw);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int half_word = static_cast<int>((first + k) % kElementsPerDraw);
      if (k > 0 && half_word == 0) {
        draw = rounding_draw(scalars.seed, scalars.step, (first + k) / kElementsPerDraw);
      }
      const uint32_t low_words = half_word < 2 ? draw.word[0] : draw.word[1];
      const uint32_t high_words = half_word < 6 ? draw.word[2] : draw.word[3];
      const uint32_t word = half_word < 4 ? low_words : high_words;
      random16[k] = half_word % 2 == 0 ? word & 0xFFFFu : word >> 16;
    }
  }
}

// A warp's elements as rows, four neighbouring elements a thread in each.
constexpr int kWarpRows = 2;
__device__ __forceinline__ int in_row(int row) { return (row * kWarp + threadIdx.x % kWarp) * 4; }

// The same for the rows of a whole warp from real index `first` on. Each thread draws for eight elements, and
// gets the bits of its own from the two threads that drew for them.
template <AdamStorage kStorage, class Scalars>
__device__ __forceinline__ void draw_random16_of_rows(const Scalars& scalars, int64_t first,
                                                      uint32_t (&random16)[kWarpRows][4]) {
  const int lane = threadIdx.x % kWarp;
  if (first % kElementsPerDraw != 0) {
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      draw_random16<kStorage, 4>(scalars, first + in_row(row), random16[row]);
    }
    return;
  }
  const PhiloxCounter mine = rounding_draw(scalars.seed, scalars.step, first / kElementsPerDraw + lane);
#pragma unroll
  for (int row = 0; row < kWarpRows; ++row) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = __shfl_sync(0xFFFFFFFFu, mine.word[w], (row * kWarp + lane) / 2);
    }
    const uint32_t low = lane % 2 == 0 ? words[0] : words[2];
    const uint32_t high = lane % 2 == 0 ? words[1] : words[3];
    random16[row][0] = low & 0xFFFFu;
    random16[row][1] = low >> 16;
    random16[row][2] = high & 0xFFFFu;
    random16[row][3] = high >> 16;
  }
}

// The first block_tiles blocks have a tile each; in the following ones every warp has. The tile is empty
// where there is none left.
struct MyTile {
  Tile tile;
  int64_t index;
  int lane;  // of the thread among those that share the tile
};
template <int kThreads>
__device__ __forceinline__ MyTile my_tile(const AdamTiles& table) {
  constexpr int kWarps = kThreads / kWarp;
  const bool by_block = blockIdx.x < table.block_tiles;
  MyTile mine;
  mine.lane = by_block ? threadIdx.x : threadIdx.x % kWarp;
  mine.index = blockIdx.x;
  if (!by_block) {
    mine.index = table.block_tiles + (blockIdx.x - table.block_tiles) * kWarps + threadIdx.x / kWarp;
  }
  const bool exists = mine.index < table.block_tiles + table.warp_tiles;
  mine.tile = exists ? table.tiles[mine.index] : Tile{};
  return mine;
}

// The blocks that work on all tiles, kThreads threads each.
template <int kThreads>
unsigned blocks_for(const AdamTiles& table) {
  const int64_t blocks = table.block_tiles + ceil_divide(table.warp_tiles, kThreads / kWarp);
  require(blocks < (int64_t{1} << 31),
          "more than 2^31 tiles in one launch; split the parameters over optimizers");
  return static_cast<unsigned>(blocks);
}

}  // namespace pacer::kernels
