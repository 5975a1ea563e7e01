// The CUDA side of casts to 8-bit floats: tile by tile (kernels/cuda/fp8_tile.cuh) where there is a transpose
// or a sum of columns, in memory order where there is none. And transposes of codes, and scales.
#include <pacer/kernels/fp8.h>

#include <type_traits>

#include <pacer/core/tile.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/cuda/eight.cuh>
#include <pacer/kernels/cuda/fp8_tile.cuh>
#include <pacer/kernels/cuda/launch.cuh>
#include <pacer/kernels/cuda/note_amax.cuh>

namespace pacer::kernels {
namespace {

constexpr int kFp8Eights = 4;  // that a thread reads at once, in memory order
constexpr int64_t kFp8Chunk = int64_t{kFp8Threads} * kFp8Eights * 8;
constexpr int64_t kMostFp8Blocks = 1 << 12;

// The matrix as it is.
template <class Element>
struct Fp8Plain {
  using Value = Element;
  static constexpr int kOutputs = 1, kBatch = sizeof(Element) == 2 ? 8 : 2;
  static constexpr int kBlocks = std::is_same_v<Element, BFloat16> ? 3 : 2;  // without spills
  static constexpr bool kKeepsZeros = true;
  struct Raw {
    Eight<Element> x;
  };
  struct Fixed {};

  const Element* x;
  int64_t columns;

  __device__ __forceinline__ Raw read(int64_t row, int64_t column) const {
    return {load_eight(x + row * columns + column)};
  }
  __device__ __forceinline__ Fixed fixed(int64_t) const { return {}; }
  __device__ __forceinline__ void make(const Raw& raw, const Fixed&, int64_t, int64_t,
                                       Eight<Value> (&made)[1]) const {
    made[0] = raw.x;
  }
  __device__ __forceinline__ float one(int64_t index) const { return load(x[index]); }
};

// Three matrices side by side.
template <class Element>
struct Fp8Beside {
  using Value = Element;
  using Raw = typename Fp8Plain<Element>::Raw;
  using Fixed = typename Fp8Plain<Element>::Fixed;
  static constexpr int kOutputs = 1, kBatch = Fp8Plain<Element>::kBatch, kBlocks = 2;
  static constexpr bool kKeepsZeros = true;

  const Element* matrices[3];
  int64_t width;  // of each

  __device__ __forceinline__ Raw read(int64_t row, int64_t column) const {
    const int which = (column >= width) + (column >= 2 * width);
    const Element* const x = which == 0 ? matrices[0] : which == 1 ? matrices[1] : matrices[2];
    return {load_eight(x + row * width + (column - which * width))};
  }
  __device__ __forceinline__ Fixed fixed(int64_t) const { return {}; }
  __device__ __forceinline__ void make(const Raw& raw, const Fixed&, int64_t, int64_t,
                                       Eight<Value> (&made)[1]) const {
    made[0] = raw.x;
  }
};

// The matrix after dropout, in fp32.
template <class Element>
struct Fp8Dropped {
  using Value = float;
  static constexpr int kOutputs = 1, kBatch = sizeof(Element) == 2 ? 4 : 2, kBlocks = 2;
  static constexpr bool kKeepsZeros = true;
  using Raw = typename Fp8Plain<Element>::Raw;
  struct Fixed {};

  Fp8Plain<Element> plain;
  Dropout dropout;

  __device__ __forceinline__ Raw read(int64_t row, int64_t column) const { return plain.read(row, column); }
  __device__ __forceinline__ Fixed fixed(int64_t) const { return {}; }
  __device__ __forceinline__ void make(const Raw& raw, const Fixed&, int64_t row, int64_t column,
                                       Eight<Value> (&made)[1]) const {
    float values[8];
    widen(raw.x, values);
    const int64_t four = (row * plain.columns + column) / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PhiloxCounter draws = dropout_draws(dropout, four + half);
#pragma unroll
      for (int k = 0; k < 4; ++k) values[4 * half + k] = drop(dropout, draws.word[k], values[4 * half + k]);
    }
    narrow(values, made[0]);
  }
  __device__ __forceinline__ float one(int64_t index) const {
    const PhiloxCounter draws = dropout_draws(dropout, index / 4);
    const uint32_t low = index % 2 == 0 ? draws.word[0] : draws.word[1];
    const uint32_t high = index % 2 == 0 ? draws.word[2] : draws.word[3];
    return drop(dropout, index % 4 < 2 ? low : high, plain.one(index));
  }
};

// A matrix of one row, as far as `source` is concerned.
template <Fp8Format kFormat, class Source>
__global__ void __launch_bounds__(kFp8Threads) fp8_cast_kernel(Source source, int64_t count, Fp8Target to) {
  if (is_superfluous(to)) return;
  const bool writes = to.codes != nullptr;
  const float scale = writes ? fp8_scale(to) : 1.0f;
  Largest<typename Source::Value> largest;
  for (int64_t chunk = blockIdx.x * kFp8Chunk; chunk < count; chunk += gridDim.x * kFp8Chunk) {
    const int64_t first = chunk + threadIdx.x * 8;
    constexpr int64_t kStep = kFp8Threads * 8;
    typename Source::Raw raw[kFp8Eights];
#pragma unroll
    for (int k = 0; k < kFp8Eights; ++k) {
      raw[k] = {};
      if (first + k * kStep + 8 <= count) raw[k] = source.read(0, first + k * kStep);
    }
#pragma unroll
    for (int k = 0; k < kFp8Eights; ++k) {
      Eight<typename Source::Value> made[1];
      source.make(raw[k], {}, 0, first + k * kStep, made);
      largest.note(made[0]);
      float values[8];
      uint32_t codes[2];
      widen(made[0], values);
      encode_eight<kFormat>(values, scale, codes);
      if (writes && first + k * kStep + 8 <= count) store_codes(to.codes + first + k * kStep, codes);
    }
  }
  uint32_t amax = largest.bits();
  const int64_t last = count / 8 * 8 + threadIdx.x;
  if (blockIdx.x == 0 && last < count) {
    const float value = source.one(last);
    amax = max(amax, magnitude_bits(value));
    if (writes) to.codes[last] = to_fp8<kFormat>(mul_(value, scale));
  }
  note_amax<kFp8Threads>(to, amax, scale);
}

__global__ void __launch_bounds__(kFp8Threads)
    fp8_transpose_kernel(const uint8_t* __restrict__ codes, int64_t rows, int64_t columns,
                         uint8_t* __restrict__ transposed) {
  __shared__ alignas(16) Fp8Crossing crossing;
  const Fp8Tile tile = fp8_tile(rows, columns);
  const Fp8Place place = fp8_place();
  const int64_t column = tile.column + place.column_eight * 8;
  const int64_t row = tile.part * kFp8Side + place.row_eight * 8;
  if (column < columns && row < rows) {
    uint32_t words[8][2];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const uint2 both = __ldg(reinterpret_cast<const uint2*>(codes + (row + r) * columns + column));
      words[r][0] = both.x;
      words[r][1] = both.y;
    }
    cross(words, place, crossing);
  }
  __syncthreads();
  store_crossed(crossing, tile, rows, columns, transposed);
}

constexpr const char* kFp8Cast = "a cast to 8-bit floats";

template <class Source>
void launch_tiles(const Fp8Cast& cast, const Source& source, Stream stream) {
  const bool measures = cast.to.codes == nullptr && cast.to.measured != nullptr;
  float* const sums = measures ? nullptr : cast.column_sums;
  const auto launch = [&](auto format) {
    launch_fp8_tiles<decltype(format)::value>(kFp8Cast, source, cast.rows, cast.columns, cast.to, nullptr,
                                              cast.partials, sums, stream);
  };
  cast.to.format == Fp8Format::e4m3 ? launch(std::integral_constant<Fp8Format, Fp8Format::e4m3>{})
                                    : launch(std::integral_constant<Fp8Format, Fp8Format::e5m2>{});
}

template <Fp8Format kFormat, class Source>
void launch_in_order(const Fp8Cast& cast, const Source& source, Stream stream) {
  const int64_t count = cast.rows * cast.columns, chunks = ceil_divide(count, kFp8Chunk);
  if (count == 0) return;
  fp8_cast_kernel<kFormat><<<static_cast<unsigned>(chunks < kMostFp8Blocks ? chunks : kMostFp8Blocks),
                             kFp8Threads, 0, static_cast<cudaStream_t>(stream)>>>(source, count, cast.to);
  check_launch(kFp8Cast);
}

template <class Source>
void launch_fp8(const Fp8Cast& cast, const Source& source, Stream stream) {
  const bool measures = cast.to.codes == nullptr && cast.to.measured != nullptr;
  if (!measures && (cast.to.transposed != nullptr || cast.column_sums != nullptr)) {
    return launch_tiles(cast, source, stream);
  }
  cast.to.format == Fp8Format::e4m3 ? launch_in_order<Fp8Format::e4m3>(cast, source, stream)
                                    : launch_in_order<Fp8Format::e5m2>(cast, source, stream);
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
  require(is_aligned(cast.x) && is_aligned(cast.beside[0]) && is_aligned(cast.beside[1]) &&
              is_aligned(cast.to.codes) && is_aligned(cast.to.transposed),
          "a cast to 8-bit floats on a GPU needs memory that begins at a multiple of 16 bytes; copy the "
          "tensor");
  require(cast.to.transposed == nullptr || (cast.rows % 16 == 0 && cast.columns % 16 == 0),
          "a cast to 8-bit floats with its transpose needs sides that are multiples of 16, not ", cast.rows,
          " x ", cast.columns, "; use 16 bits there");
  require(cast.column_sums == nullptr || cast.columns % 8 == 0,
          "a cast on a GPU with sums of columns needs columns that are a multiple of 8, not ", cast.columns);
  check_fp8_cast(cast);
  require(
      cast.beside[0] == nullptr || cast.columns % 24 == 0,
      "a cast on a GPU of three matrices side by side needs columns of each that are a multiple of 8, not ",
      cast.columns / 3);
  with_element(cast.type, [&](auto element) {
    using Element = decltype(element);
    if (cast.beside[0] != nullptr) {
      const auto part = [](const void* x) { return static_cast<const Element*>(x); };
      const Fp8Beside<Element> source{{part(cast.x), part(cast.beside[0]), part(cast.beside[1])},
                                      cast.columns / 3};
      return launch_tiles(cast, source, stream);
    }
    const Fp8Plain<Element> plain{static_cast<const Element*>(cast.x), cast.columns};
    if (cast.dropout.threshold == 0) {
      launch_fp8(cast, plain, stream);
    } else {
      launch_fp8(cast, Fp8Dropped<Element>{plain, cast.dropout}, stream);
    }
  });
}

void fp8_transpose_cuda(const uint8_t* codes, int64_t rows, int64_t columns, uint8_t* transposed,
                        Stream stream) {
  require(is_aligned(codes) && is_aligned(transposed),
          "a transpose of 8-bit floats on a GPU needs memory that begins at a multiple of 16 bytes; copy the "
          "tensor");
  require(rows % 16 == 0 && columns % 16 == 0,
          "a transpose of 8-bit floats on a GPU needs sides that are multiples of 16, not ", rows, " x ",
          columns, "; use 16 bits there");
  const unsigned blocks = fp8_tiles(rows, columns);
  if (blocks == 0) return;
  fp8_transpose_kernel<<<blocks, kFp8Threads, 0, static_cast<cudaStream_t>(stream)>>>(codes, rows, columns,
                                                                                      transposed);
  check_launch("a transpose of 8-bit floats");
}

void fp8_update_cuda(Fp8Scale* tensors, uint32_t* histories, int64_t count, const Fp8Rule& rule,
                     const GradientCheck* check, Stream stream) {
  if (count == 0) return;
  fp8_update_kernel<<<static_cast<unsigned>(ceil_divide(count, kFp8Threads)), kFp8Threads, 0,
                      static_cast<cudaStream_t>(stream)>>>(tensors, histories, count, rule, check);
  check_launch("the update of scales");
}

}  // namespace pacer::kernels
