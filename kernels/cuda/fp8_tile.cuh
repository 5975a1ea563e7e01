// What all kernels share that make 8-bit floats of a matrix together with the transpose and sums of columns.
//
// A block takes a tile of 128 x 128 elements, a part of kernels/fp8.h high, and a thread eight neighbouring
// columns of eight neighbouring rows of it, so that 16 bits are read in accesses of 16 bytes that leave no
// gaps. Where the elements come from is the business of a source, which has
//
//   Value          type of what is cast (BFloat16, Float16, float)
//   kOutputs       matrices of that shape that it makes at once, which lie side by side in memory
//   kBatch         rows that a thread reads at once, while it works on those before; 8, 4, 2 or 1
//   Raw, read      what it reads for eight elements, zeros where it is not called
//   Fixed, fixed   what it knows of eight columns
//   make           eight values of each output
//   kKeepsZeros    whether those of what was not read are zeros
//   kBlocks        blocks for which registers are to suffice at once on a multiprocessor
#pragma once

#include <pacer/core/tile.h>
#include <pacer/kernels/fp8.h>
#include <pacer/kernels/cuda/eight.cuh>
#include <pacer/kernels/cuda/launch.cuh>
#include <pacer/kernels/cuda/note_amax.cuh>

namespace pacer::kernels {

constexpr int kFp8Threads = 256;
constexpr int kFp8Side = 128;  // of a tile
static_assert(kFp8Side == kFp8PartRows);
constexpr int kFp8Words = kFp8Side / 4;  // of a column's codes
// Tiles below each other that are worked on at the same time, so that rows of the transpose, too, are written
// in long pieces.
constexpr unsigned kFp8TilesBelow = 8;

// Which eight columns and rows of a tile a thread has. Eight neighbouring lanes read 128 bytes, and the lanes
// of half a warp write to all banks of shared memory.
struct Fp8Place {
  int column_eight, row_eight;
};
__device__ __forceinline__ Fp8Place fp8_place() {
  const int lane = threadIdx.x % 32;
  return {lane % 8 + lane / 16 * 8, static_cast<int>(threadIdx.x) / 32 * 2 + lane / 8 % 2};
}

// The tile of a block, in a grid of fp8_tiles blocks.
struct Fp8Tile {
  int64_t part, column;  // its first column
};
__device__ __forceinline__ Fp8Tile fp8_tile(int64_t rows, int64_t columns) {
  const auto across = static_cast<unsigned>(ceil_divide(columns, kFp8Side));
  const auto parts = static_cast<unsigned>(ceil_divide(rows, kFp8Side));
  const unsigned above = blockIdx.x / (kFp8TilesBelow * across) * kFp8TilesBelow;
  const unsigned below = min(kFp8TilesBelow, parts - above);
  const unsigned index = blockIdx.x - above * across;
  return {above + index % below, static_cast<int64_t>(index / below) * kFp8Side};
}
inline unsigned fp8_tiles(int64_t rows, int64_t columns) {
  const int64_t blocks = ceil_divide(rows, kFp8Side) * ceil_divide(columns, kFp8Side);
  require(blocks < (int64_t{1} << 31), "a matrix of ", rows, " x ", columns,
          " is too large for one cast; split it");
  return static_cast<unsigned>(blocks);
}

// Four rows of four codes become four columns.
__device__ __forceinline__ void transpose_codes(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low_01 = __byte_perm(rows[0], rows[1], 0x5140),
                 low_23 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high_01 = __byte_perm(rows[0], rows[1], 0x7362),
                 high_23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low_01, low_23, 0x5410);
  columns[1] = __byte_perm(low_01, low_23, 0x7632);
  columns[2] = __byte_perm(high_01, high_23, 0x5410);
  columns[3] = __byte_perm(high_01, high_23, 0x7632);
}

// A tile's codes on their way: column by column, the words of a column in groups of four (16 rows) whose
// order differs from one column_eight to the next, so that no two lanes meet in a bank.
using Fp8Crossing = uint32_t[kFp8Side][kFp8Words];
__device__ __forceinline__ int fp8_group(int column, int group) { return (group ^ (column / 8 % 8)) * 4; }

// Every thread calls it with its codes: [row][word of four columns].
__device__ __forceinline__ void cross(const uint32_t (&codes)[8][2], Fp8Place place, Fp8Crossing& crossing) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    uint32_t upper[4], lower[4];
    transpose_codes({codes[0][w], codes[1][w], codes[2][w], codes[3][w]}, upper);
    transpose_codes({codes[4][w], codes[5][w], codes[6][w], codes[7][w]}, lower);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int column = place.column_eight * 8 + w * 4 + c;
      const int word = fp8_group(column, place.row_eight / 2) + place.row_eight % 2 * 2;
      *reinterpret_cast<uint2*>(&crossing[column][word]) = make_uint2(upper[c], lower[c]);
    }
  }
}
// After __syncthreads, by all threads: sixteen rows of a column become sixteen columns of a row.
__device__ __forceinline__ void store_crossed(const Fp8Crossing& crossing, Fp8Tile tile, int64_t rows,
                                              int64_t columns, uint8_t* transposed) {
#pragma unroll
  for (int pass = 0; pass < kFp8Side * kFp8Side / 16 / kFp8Threads; ++pass) {
    const int i = pass * kFp8Threads + threadIdx.x;
    const int column = i / (kFp8Side / 16), group = i % (kFp8Side / 16);
    const int64_t to_row = tile.column + column, to_column = tile.part * kFp8Side + group * 16;
    if (to_row >= columns || to_column >= rows) continue;
    *reinterpret_cast<uint4*>(transposed + to_row * rows + to_column) =
        *reinterpret_cast<const uint4*>(&crossing[column][fp8_group(column, group)]);
  }
}

using Fp8WarpSums = float[kFp8Threads / 32][kFp8Side];

// Every thread calls it with the sums of its two fours of rows. Stores those of the warp's sixteen rows.
__device__ __forceinline__ void add_in_warp(const float (&fours)[2][8], Fp8Place place, Fp8WarpSums& sums) {
  const bool is_lower = place.row_eight % 2 != 0;
  float kept[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float left = fours[0][c] + fours[1][c], right = fours[0][c + 4] + fours[1][c + 4];
    const float received = __shfl_xor_sync(0xFFFFFFFFu, is_lower ? left : right, 8);
    kept[c] = (is_lower ? right : left) + received;
  }
  *reinterpret_cast<float4*>(&sums[threadIdx.x / 32][place.column_eight * 8 + is_lower * 4]) =
      make_float4(kept[0], kept[1], kept[2], kept[3]);
}
// After __syncthreads: the sum of a column of the tile.
__device__ __forceinline__ float add_warps(const Fp8WarpSums& sums, int column) {
  float of[kFp8Threads / 32];
#pragma unroll
  for (int warp = 0; warp < kFp8Threads / 32; ++warp) of[warp] = sums[warp][column];
#pragma unroll
  for (int distance = 1; distance < kFp8Threads / 32; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kFp8Threads / 32; i += 2 * distance) of[i] += of[i + distance];
  }
  return of[0];
}

// rows x columns elements of each output. `values` (may be null) are written as they are cast, `partials`
// only where kSums. Wherever there is a transpose, sides are multiples of 16; otherwise `columns` is one
// of 8.
template <Fp8Format kFormat, bool kSums, class Source>
__global__ void __launch_bounds__(kFp8Threads, Source::kBlocks)
    fp8_tile_kernel(Source source, int64_t rows, int64_t columns, Fp8Target to,
                    typename Source::Value* values, float* partials) {
  using Value = typename Source::Value;
  constexpr int kOutputs = Source::kOutputs, kBatch = Source::kBatch;
  __shared__ alignas(16) Fp8Crossing crossing[kOutputs];
  __shared__ alignas(16) Fp8WarpSums warp_sums[kSums ? kOutputs : 1];
  if constexpr (kSums) let_next_kernel_start();
  const bool writes = to.codes != nullptr;
  const bool measures = !writes && to.measured != nullptr && !is_superfluous(to);
  if (!writes && !measures && !kSums && values == nullptr) return;
  const Fp8Tile tile = fp8_tile(rows, columns);
  const Fp8Place place = fp8_place();
  const int64_t column = tile.column + place.column_eight * 8;
  const int64_t row = tile.part * kFp8Side + place.row_eight * 8;
  const bool is_inside = column < columns && row < rows;
  typename Source::Raw raw[8];  // of which two batches are alive at once
  const auto read = [&](int first) {
#pragma unroll
    for (int r = first; r < first + kBatch; ++r) {
      raw[r] = {};
      if (row + r < rows) raw[r] = source.read(row + r, column);
    }
  };
  if (is_inside) read(0);
  const float scale = writes ? fp8_scale(to) : 1.0f;  // meanwhile
  Largest<Value> largest;
  uint32_t codes[kOutputs][8][2];
  float fours[kOutputs][2][8] = {};
  if (is_inside) {
    const typename Source::Fixed fixed = source.fixed(column);
#pragma unroll
    for (int first = 0; first < 8; first += kBatch) {
      if (first + kBatch < 8) read(first + kBatch);
#pragma unroll
      for (int r = first; r < first + kBatch; ++r) {
        Eight<Value> made[kOutputs];
        source.make(raw[r], fixed, row + r, column, made);
#pragma unroll
        for (int output = 0; output < kOutputs; ++output) {
          if constexpr (!Source::kKeepsZeros) {
            if (row + r >= rows) made[output] = {};
          }
          const int64_t index = ((row + r) * kOutputs + output) * columns + column;
          if (values != nullptr && row + r < rows) store_eight(values + index, made[output]);
          largest.note(made[output]);
          float wide[8];
          widen(made[output], wide);
          if constexpr (kSums) {
#pragma unroll
            for (int c = 0; c < 8; ++c) fours[output][r / 4][c] += wide[c];
          }
          encode_eight<kFormat>(wide, scale, codes[output][r]);
          if (writes && row + r < rows) store_codes(to.codes + index, codes[output][r]);
        }
      }
    }
    if (to.transposed != nullptr) {
#pragma unroll
      for (int output = 0; output < kOutputs; ++output) cross(codes[output], place, crossing[output]);
    }
  }
  if constexpr (kSums) {
#pragma unroll
    for (int output = 0; output < kOutputs; ++output) {
      add_in_warp(fours[output], place, warp_sums[output]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int output = 0; output < kOutputs; ++output) {
    if (to.transposed != nullptr) {
      store_crossed(crossing[output], tile, rows, columns, to.transposed + output * columns * rows);
    }
    if constexpr (kSums) {
      const int64_t summed = tile.column + threadIdx.x;
      if (threadIdx.x < kFp8Side && summed < columns) {
        partials[(tile.part * kOutputs + output) * columns + summed] =
            add_warps(warp_sums[output], threadIdx.x);
      }
    }
  }
  if (writes || measures) note_amax<kFp8Threads>(to, largest.bits(), scale);
}

// Sums of columns from those of all parts: a warp has a strand, a lane a column.
template <int kStrands>
__global__ void __launch_bounds__(kStrands * 32)
    fp8_add_parts_kernel(const float* partials, int64_t parts, int64_t columns, float* sums) {
  __shared__ float strands[kStrands][32];
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, strand = threadIdx.x / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t part = strand; part < parts; part += kStrands) sum += partials[part * columns + column];
  }
  strands[strand][lane] = sum;
#pragma unroll
  for (int distance = 1; distance < kStrands; distance *= 2) {
    __syncthreads();
    if (strand % (2 * distance) == 0) strands[strand][lane] += strands[strand + distance][lane];
  }
  if (strand == 0 && column < columns) sums[column] = strands[0][lane];
}

// Enqueues the tiles, and the sums where `column_sums` is not null.
template <Fp8Format kFormat, class Source>
void launch_fp8_tiles(const char* what, const Source& source, int64_t rows, int64_t columns,
                      const Fp8Target& to, typename Source::Value* values, float* partials,
                      float* column_sums, Stream stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const unsigned blocks = fp8_tiles(rows, columns);
  if (column_sums == nullptr) {
    if (blocks == 0) return;
    fp8_tile_kernel<kFormat, false>
        <<<blocks, kFp8Threads, 0, on>>>(source, rows, columns, to, values, partials);
    return check_launch(what);
  }
  const int64_t width = columns * Source::kOutputs;
  if (width == 0) return;
  if (blocks > 0) {
    fp8_tile_kernel<kFormat, true>
        <<<blocks, kFp8Threads, 0, on>>>(source, rows, columns, to, values, partials);
    check_launch(what);
  }
  launch_overlapped("sums of columns", blocks > 0, fp8_add_parts_kernel<kFp8Strands>,
                    static_cast<unsigned>(ceil_divide(width, 32)), kFp8Strands * 32, on, partials,
                    fp8_parts(rows), width, column_sums);
}

}  // namespace pacer::kernels
