// The CUDA side of casts to 8-bit floats. With the transpose a block takes 128 x 128 elements: a thread has
// 16 columns of four rows, so that both matrices are read and written in accesses of 16 bytes; four bytes
// below each other become one word of the transpose, which crosses over in shared memory without bank
// conflicts.
#include <pacer/kernels/fp8.h>

#include <pacer/core/tile.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/cuda/launch.cuh>
#include <pacer/kernels/cuda/packet.cuh>

namespace pacer::kernels {
namespace {

constexpr int kFp8Threads = 256;
constexpr int kFp8Piece = 16;  // elements that a thread loads at once
constexpr int kFp8Side = 128;  // of a tile
constexpr int kFp8Rows = 4;
constexpr unsigned kMostFp8Blocks = 1 << 12;

// The largest of the block's, into *amax.
__device__ __forceinline__ void merge_amax(uint32_t mine, uint32_t* amax) {
  __shared__ uint32_t of_warps[kFp8Threads / kWarp];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    mine = max(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, distance));
  }
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kFp8Threads / kWarp; ++warp) mine = max(mine, of_warps[warp]);
  // It only grows, so that most blocks need not write.
  if (mine > *static_cast<volatile uint32_t*>(amax)) atomicMax(amax, mine);
}

// N values as codes, four to a word, the first one lowest.
template <Fp8Format kFormat, class Element, int N>
__device__ __forceinline__ void encode_fp8(const Element (&x)[N], float scale, uint32_t (&words)[N / 4],
                                           uint32_t& largest) {
  constexpr auto kKind = kFormat == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2;
  const auto pair = [&](int i) -> uint32_t {
    const float a = load(x[i]), b = load(x[i + 1]);
    largest = max(largest, max(magnitude_bits(a), magnitude_bits(b)));
    return __nv_cvt_float2_to_fp8x2(make_float2(mul_(a, scale), mul_(b, scale)), __NV_SATFINITE, kKind);
  };
#pragma unroll
  for (int w = 0; w < N / 4; ++w) words[w] = pair(4 * w) | pair(4 * w + 2) << 16;
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

// To memory of bytes that is aligned for it.
__device__ __forceinline__ void store_codes(uint8_t* codes, const uint32_t (&words)[kFp8Piece / 4]) {
  store_packet(reinterpret_cast<uint32_t*>(codes), words);
}

template <Fp8Format kFormat, class Element>
__global__ void __launch_bounds__(kFp8Threads)
    fp8_cast_kernel(const Element* __restrict__ x, int64_t count, const float* __restrict__ scale,
                    uint8_t* __restrict__ codes, uint32_t* __restrict__ amax) {
  const float factor = codes != nullptr ? *scale : 1.0f;
  uint32_t largest = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFp8Threads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kFp8Threads + threadIdx.x;
  for (int64_t piece = first; piece < count / kFp8Piece; piece += step) {
    Element values[kFp8Piece];
    uint32_t words[kFp8Piece / 4];
    load_packet(x + piece * kFp8Piece, values);
    encode_fp8<kFormat>(values, factor, words, largest);
    if (codes != nullptr) store_codes(codes + piece * kFp8Piece, words);
  }
  for (int64_t i = count / kFp8Piece * kFp8Piece + first; i < count; i += step) {
    const float value = load(x[i]);
    largest = max(largest, magnitude_bits(value));
    if (codes != nullptr) codes[i] = to_fp8<kFormat>(mul_(value, factor));
  }
  if (amax != nullptr) merge_amax(largest, amax);
}

template <Fp8Format kFormat, class Element>
__global__ void __launch_bounds__(kFp8Threads)
    fp8_cast_transpose_kernel(const Element* __restrict__ x, int64_t rows, int64_t columns,
                              const float* __restrict__ scale, uint8_t* __restrict__ codes,
                              uint8_t* __restrict__ transposed, uint32_t* __restrict__ amax) {
  constexpr int kWords = kFp8Side / kFp8Rows;  // of a column of the tile
  __shared__ alignas(16) uint32_t crossing[kFp8Side][kWords];
  const float factor = *scale;
  const int piece = threadIdx.x % (kFp8Side / kFp8Piece), four = threadIdx.x / (kFp8Side / kFp8Piece);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kFp8Side + piece * kFp8Piece;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kFp8Side + four * kFp8Rows;
  uint32_t largest = 0;
  if (column < columns && row < rows) {
    uint32_t words[kFp8Rows][kFp8Piece / 4];
#pragma unroll
    for (int r = 0; r < kFp8Rows; ++r) {
      Element values[kFp8Piece];
      load_packet(x + (row + r) * columns + column, values);
      encode_fp8<kFormat>(values, factor, words[r], largest);
      store_codes(codes + (row + r) * columns + column, words[r]);
    }
#pragma unroll
    for (int w = 0; w < kFp8Piece / 4; ++w) {
      uint32_t crossed[4];
      transpose_codes({words[0][w], words[1][w], words[2][w], words[3][w]}, crossed);
#pragma unroll
      for (int c = 0; c < 4; ++c) crossing[piece * kFp8Piece + 4 * w + c][four ^ (piece * 4)] = crossed[c];
    }
  }
  __syncthreads();
  // Sixteen rows of a column become sixteen columns of a row.
  for (int i = threadIdx.x; i < kFp8Side * kFp8Side / kFp8Piece; i += kFp8Threads) {
    const int from_column = i / (kFp8Side / kFp8Piece), from_row = i % (kFp8Side / kFp8Piece);
    const int64_t to_row = static_cast<int64_t>(blockIdx.x) * kFp8Side + from_column;
    const int64_t to_column = static_cast<int64_t>(blockIdx.y) * kFp8Side + from_row * kFp8Piece;
    if (to_row >= columns || to_column >= rows) continue;
    const int word = (from_row * 4) ^ (from_column / kFp8Piece * 4);
    *reinterpret_cast<uint4*>(transposed + to_row * rows + to_column) =
        *reinterpret_cast<const uint4*>(&crossing[from_column][word]);
  }
  if (amax != nullptr) merge_amax(largest, amax);
}

template <Fp8Format kFormat, class Element>
void launch_fp8(const Fp8Cast& cast, Stream stream) {
  const auto* x = static_cast<const Element*>(cast.x);
  const auto on = static_cast<cudaStream_t>(stream);
  if (cast.transposed == nullptr) {
    const int64_t count = cast.rows * cast.columns;
    const int64_t blocks = ceil_divide(ceil_divide(count, kFp8Piece), kFp8Threads);
    fp8_cast_kernel<kFormat>
        <<<static_cast<unsigned>(blocks < kMostFp8Blocks ? blocks : kMostFp8Blocks), kFp8Threads, 0, on>>>(
            x, count, cast.scale, cast.codes, cast.amax);
  } else {
    const dim3 grid(static_cast<unsigned>(ceil_divide(cast.columns, kFp8Side)),
                    static_cast<unsigned>(ceil_divide(cast.rows, kFp8Side)));
    fp8_cast_transpose_kernel<kFormat><<<grid, kFp8Threads, 0, on>>>(x, cast.rows, cast.columns, cast.scale,
                                                                     cast.codes, cast.transposed, cast.amax);
  }
  check_launch("a cast to 8-bit floats");
}

template <class Element>
void launch_fp8_source(const Fp8Cast& cast, Stream stream) {
  cast.format == Fp8Format::e4m3 ? launch_fp8<Fp8Format::e4m3, Element>(cast, stream)
                                 : launch_fp8<Fp8Format::e5m2, Element>(cast, stream);
}

__global__ void __launch_bounds__(kFp8Threads)
    fp8_update_kernel(Fp8Scale* tensors, uint32_t* histories, int64_t count, Fp8Rule rule,
                      const GradientCheck* check) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kFp8Threads + threadIdx.x;
  if (i >= count) return;
  if (check != nullptr && check->non_finite != 0) tensors[i].amax = 0;
  fp8_update(tensors[i], histories + i * rule.history, rule);
}

}  // namespace

void fp8_cast_cuda(const Fp8Cast& cast, Stream stream) {
  require(is_aligned(cast.x) && is_aligned(cast.codes) && is_aligned(cast.transposed),
          "a cast to 8-bit floats on a GPU needs memory that begins at a multiple of 16 bytes; copy the "
          "tensor");
  require(cast.transposed == nullptr || (cast.rows % 16 == 0 && cast.columns % 16 == 0),
          "a cast to 8-bit floats with its transpose needs sides that are multiples of 16, not ", cast.rows,
          " x ", cast.columns, "; use 16 bits there");
  if (cast.rows == 0 || cast.columns == 0) return;
  switch (cast.source) {
    case Fp8Source::f32:
      return launch_fp8_source<float>(cast, stream);
    case Fp8Source::bf16:
      return launch_fp8_source<BFloat16>(cast, stream);
    case Fp8Source::f16:
      return launch_fp8_source<Float16>(cast, stream);
  }
}

void fp8_update_cuda(Fp8Scale* tensors, uint32_t* histories, int64_t count, const Fp8Rule& rule,
                     const GradientCheck* check, Stream stream) {
  if (count == 0) return;
  fp8_update_kernel<<<static_cast<unsigned>(ceil_divide(count, kFp8Threads)), kFp8Threads, 0,
                      static_cast<cudaStream_t>(stream)>>>(tensors, histories, count, rule, check);
  check_launch("the update of scales");
}

}  // namespace pacer::kernels
