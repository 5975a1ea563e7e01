// The CUDA side of NF4. Tables of 16 and 32 entries lie in the registers of a warp's lanes, one each, and are
// looked up by shuffles. bf16 and an aligned tensor: quantising is one pass of 2.56 bytes an element, and
// with double quantisation two small ones over the scales, which are in the cache by then; decoding is one
// pass, 2.52 bytes an element, scales of 8 bits included. No sum depends on the order of threads.
#include <pacer/kernels/nf4.h>

#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/cuda/eight.cuh>
#include <pacer/kernels/cuda/fold.cuh>
#include <pacer/kernels/cuda/launch.cuh>

namespace pacer::kernels {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kNf4Threads = 256;
constexpr int kNf4Lanes = 32;
constexpr uint32_t kNf4Zeros = 0x77777777u;  // eight codes of 0
constexpr int64_t kNf4Pass = 8 * kNf4Lanes;  // elements that a warp works on side by side, 8 a lane

struct Nf4Book {
  float values[16];
};
constexpr Nf4Book nf4_book() {
  Nf4Book book{};
  for (int i = 0; i < 16; ++i) book.values[i] = kNf4Book[i];
  return book;
}
__device__ const Nf4Book nf4_device_book = nf4_book();
__device__ const Nf4Buckets nf4_device_buckets = nf4_buckets();

// ---- Quantising: a thread block makes the codes of 256 blocks, a nested block. ----

// The next eight elements, zeros from `count` on.
template <class Element>
__device__ __forceinline__ Eight<Element> load_eight_below(const Element* x, int64_t first, int64_t count) {
  if (first + 8 <= count) return load_eight(x + first);
  Element elements[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    elements[i] = Element{};
    if (first + i < count) elements[i] = x[first + i];
  }
  Eight<Element> eight;
  memcpy(eight.words, elements, sizeof eight.words);
  return eight;
}

// Eight codes, as they lie in memory: the upper half of a byte comes first. A shuffle looks at the index's
// lower five bits only.
template <class Element>
__device__ __forceinline__ uint32_t encode_eight_nf4(const Eight<Element>& eight, float inverse,
                                                     float threshold, uint32_t below) {
  float values[8];
  widen(eight, values);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float scaled = mul_(values[6 - i / 2 * 2 + i % 2], inverse);
    const int bucket = static_cast<int>(nf4_bucket(scaled));
    word = (word << 4) + __shfl_sync(kAllLanes, below, bucket);
    if (scaled > __shfl_sync(kAllLanes, threshold, bucket)) ++word;
  }
  return word;
}

// `codes`: word `index` of them, of which the last may be a part.
__device__ __forceinline__ void store_word_below(uint8_t* codes, int64_t index, int64_t bytes,
                                                 uint32_t word) {
  if (4 * index + 4 <= bytes) {
    reinterpret_cast<uint32_t*>(codes)[index] = word;
    return;
  }
  for (int k = 0; k < 4; ++k) {
    if (4 * index + k < bytes) codes[4 * index + k] = static_cast<uint8_t>(word >> (8 * k));
  }
}

// Codes of elements from `begin` on, and all 256 scales: behind the last element those of zeros. kWhole:
// there are as many elements as a nested block has.
template <bool kWhole, class Element>
__device__ __forceinline__ void encode_nested_block(const Element* __restrict__ x, int64_t begin,
                                                    int64_t count, uint8_t* __restrict__ codes,
                                                    float (&scales)[kNf4NestedBlock]) {
  constexpr int kWarps = kNf4Threads / kNf4Lanes;
  constexpr int kStep = kWarps * static_cast<int>(kNf4Pass);
  constexpr int kPasses = static_cast<int>(kNf4NestedBlock * kNf4Block) / kStep;
  constexpr int kBatch = !kWhole ? 1 : sizeof(Element) == 2 ? 4 : 2;  // passes that are read at once
  const int lane = threadIdx.x % kNf4Lanes;
  const float threshold = nf4_device_buckets.threshold[lane];
  const uint32_t below = nf4_device_buckets.below[lane];
#pragma unroll 1
  for (int pass = 0; pass < kPasses; pass += kBatch) {
    const int first = pass * kStep + static_cast<int>(threadIdx.x) * 8;
    Eight<Element> eights[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if constexpr (kWhole) {
        eights[k] = load_eight(x + begin + first + k * kStep);
      } else {
        eights[k] = load_eight_below(x, begin + first, count);
      }
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      Largest<Element> largest;
      largest.note(eights[k]);
      uint32_t absmax = largest.bits();
#pragma unroll
      for (int h = 4; h >= 1; h /= 2) absmax = max(absmax, __shfl_xor_sync(kAllLanes, absmax, h));
      const float scale = float_of(absmax);
      uint32_t word = encode_eight_nf4(eights[k], nf4_inverse(scale), threshold, below);
      if (!is_finite_amax(absmax)) word = kNf4Zeros;
      if (lane % 8 == 0) scales[(first + k * kStep) / kNf4Block] = scale;
      if constexpr (kWhole) {
        *reinterpret_cast<uint32_t*>(codes + begin / 2 + first / 2 + k * kStep / 2) = word;
      } else {
        store_word_below(codes, (begin + first) / 8, nf4_bytes(count), word);
      }
    }
  }
}

// kMeans: parts of the mean of the scales are wanted, a thread block's in means[blockIdx.x].
template <class Element, bool kMeans>
__global__ void __launch_bounds__(kNf4Threads)
    nf4_quantize_kernel(const Element* __restrict__ x, int64_t count, uint8_t* __restrict__ codes,
                        float* __restrict__ scales, float* __restrict__ means) {
  __shared__ float shared_scales[kNf4NestedBlock];
  const int64_t begin = blockIdx.x * (kNf4NestedBlock * kNf4Block);
  if (begin + kNf4NestedBlock * kNf4Block <= count) {
    encode_nested_block<true>(x, begin, count, codes, shared_scales);
  } else {
    encode_nested_block<false>(x, begin, count, codes, shared_scales);
  }
  __syncthreads();
  const int64_t block = blockIdx.x * kNf4NestedBlock + threadIdx.x;
  const float scale = shared_scales[threadIdx.x];
  if (block < nf4_blocks(count)) scales[block] = scale;
  if constexpr (kMeans) {
    __shared__ double sums[kNf4NestedBlock];
    sums[threadIdx.x] = static_cast<double>(scale);
    const double sum = fold_block<kNf4NestedBlock>(sums);
    if (threadIdx.x == 0) means[blockIdx.x] = nf4_mean_of_block(sum);
  }
}

// One thread block.
__global__ void __launch_bounds__(kPartialColumns)
    nf4_offset_kernel(const float* __restrict__ means, int64_t blocks, int64_t scales,
                      float* __restrict__ offset) {
  __shared__ double columns[kPartialColumns];
  double column = 0;
  for (int64_t i = threadIdx.x; i < blocks; i += kPartialColumns) column += static_cast<double>(means[i]);
  columns[threadIdx.x] = column;
  const double sum = fold_block<kPartialColumns>(columns);
  if (threadIdx.x == 0) *offset = nf4_offset(sum, scales);
}

// A thread block a nested block.
__global__ void __launch_bounds__(kNf4NestedBlock)
    nf4_scales_kernel(const float* __restrict__ scales, int64_t count, const float* __restrict__ map,
                      const float* __restrict__ offset, float* __restrict__ nested_absmax,
                      uint8_t* __restrict__ codes) {
  constexpr int kWarps = static_cast<int>(kNf4NestedBlock) / kNf4Lanes;
  __shared__ float borders[kNf4NestedBlock];
  __shared__ uint32_t largest[kWarps];
  const int thread = threadIdx.x;
  if (thread < kNf4NestedBorders) borders[thread] = nf4_nested_border(map, thread);
  const int64_t i = blockIdx.x * kNf4NestedBlock + thread;
  const float distance = i < count ? scales[i] - *offset : 0.0f;
  uint32_t absmax = magnitude_bits(distance);
#pragma unroll
  for (int h = 16; h >= 1; h /= 2) absmax = max(absmax, __shfl_xor_sync(kAllLanes, absmax, h));
  if (thread % kNf4Lanes == 0) largest[thread / kNf4Lanes] = absmax;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) absmax = max(absmax, largest[w]);
  const float scale = float_of(absmax);
  if (thread == 0) nested_absmax[blockIdx.x] = scale;
  if (i >= count) return;
  const uint32_t code = nf4_nested_encode(borders, mul_(distance, nf4_inverse(scale)));
  codes[i] = static_cast<uint8_t>(is_finite_amax(absmax) ? code : kNf4NestedZero);
}

// ---- Decoding ----

constexpr int kNf4Words = 4;                        // of eight codes, that a lane decodes
constexpr int64_t kNf4Tile = kNf4Words * kNf4Pass;  // elements of a warp
constexpr int kNf4Scales = kNf4Tile / kNf4Block;    // of a warp
static_assert(kNf4Scales <= kNf4Lanes && kNf4NestedBlock % kNf4Scales == 0);

__device__ __forceinline__ float nf4_scale(const Nf4Codes& from, int64_t block) {
  if (from.absmax_codes == nullptr) return __ldg(from.absmax + block);
  return nf4_nested_decode(__ldg(from.nested_map + __ldg(from.absmax_codes + block)),
                           __ldg(from.nested_absmax + block / kNf4NestedBlock), __ldg(from.offset));
}

__device__ __forceinline__ uint32_t load_word_below(const uint8_t* codes, int64_t index, int64_t bytes) {
  if (4 * index + 4 <= bytes) return __ldg(reinterpret_cast<const uint32_t*>(codes) + index);
  uint32_t word = kNf4Zeros;
  for (int k = 0; k < 4; ++k) {
    if (4 * index + k < bytes)
      word = (word & ~(0xFFu << (8 * k))) | uint32_t{codes[4 * index + k]} << (8 * k);
  }
  return word;
}

// Rows that lie apart. A division by the number of columns is a product here and corrected by one, which is
// exact for elements below 2^52.
struct Nf4Rows {
  int64_t columns, stride;
  double rows_an_element;  // 1 / columns
  bool has_whole_eights;   // rows begin at multiples of eight elements and are as long

  struct Place {
    int64_t index, column;
  };
  __device__ __forceinline__ Place place(int64_t element) const {
    auto row = static_cast<int64_t>(static_cast<double>(element) * rows_an_element);
    int64_t column = element - row * columns;
    if (column < 0) {
      --row;
      column += columns;
    } else if (column >= columns) {
      ++row;
      column -= columns;
    }
    return {row * stride + column, column};
  }
  __device__ __forceinline__ void advance(Place& place) const {
    ++place.index;
    if (++place.column < columns) return;
    place.index += stride - columns;
    place.column = 0;
  }
};

// A warp's elements, from `begin` on. kWhole: there are as many as it takes.
template <bool kDense, bool kWhole, class Element>
__device__ __forceinline__ void decode_tile(const Nf4Codes& from, Element* __restrict__ out,
                                            const Nf4Rows& rows, int64_t begin) {
  const int lane = threadIdx.x % kNf4Lanes;
  const float book = nf4_device_book.values[lane % 16];
  uint32_t words[kNf4Words];
#pragma unroll
  for (int k = 0; k < kNf4Words; ++k) {
    if constexpr (kWhole) {
      words[k] = __ldg(reinterpret_cast<const uint32_t*>(from.codes + begin / 2) + k * kNf4Lanes + lane);
    } else {
      words[k] = load_word_below(from.codes, begin / 8 + k * kNf4Lanes + lane, nf4_bytes(from.count));
    }
  }
  const int64_t block = begin / kNf4Block + lane;
  const bool has_scale = lane < kNf4Scales && (kWhole || block < nf4_blocks(from.count));
  const float scale = has_scale ? nf4_scale(from, block) : 0.0f;
#pragma unroll
  for (int k = 0; k < kNf4Words; ++k) {
    const float scale_of_mine = __shfl_sync(kAllLanes, scale, k * (kNf4Lanes / 8) + lane / 8);
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // A shuffle within halves of a warp looks at the index's lower four bits only.
      const uint32_t code = words[k] >> (8 * (i / 2) + (i % 2 == 0 ? 4 : 0));
      values[i] = mul_(__shfl_sync(kAllLanes, book, static_cast<int>(code), 16), scale_of_mine);
    }
    const int64_t first = begin + k * kNf4Pass + lane * 8;
    if ((kWhole || first + 8 <= from.count) && (kDense || rows.has_whole_eights)) {
      Eight<Element> eight;
      narrow(values, eight);
      store_eight(out + (kDense ? first : rows.place(first).index), eight);
    } else if (!kWhole || !kDense) {
      auto place = kDense ? Nf4Rows::Place{first, 0} : rows.place(first);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (kWhole || first + i < from.count) store(values[i], out[place.index]);
        if (kDense) {
          ++place.index;
        } else {
          rows.advance(place);
        }
      }
    }
  }
}

// Thread blocks that a multiprocessor shall have room for: all that it can hold where that is 2,048 threads.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
constexpr int kNf4DecodeBlocks = 8;
#else
constexpr int kNf4DecodeBlocks = 4;
#endif

template <class Element, bool kDense>
__global__ void __launch_bounds__(kNf4Threads, kDense ? kNf4DecodeBlocks : 1)
    nf4_decode_kernel(Nf4Codes from, Element* __restrict__ out, Nf4Rows rows) {
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kNf4Threads + threadIdx.x) / kNf4Lanes;
  const int64_t begin = warp * kNf4Tile;
  if (begin + kNf4Tile <= from.count) {
    decode_tile<kDense, true>(from, out, rows, begin);
  } else if (begin < from.count) {
    decode_tile<kDense, false>(from, out, rows, begin);
  }
}

constexpr const char* kNf4Quantize = "quantising to 4 bits";
constexpr const char* kNf4Decode = "decoding numbers in 4 bits";

unsigned nf4_grid(int64_t count, int64_t of_a_block) {
  const int64_t blocks = ceil_divide(count, of_a_block);
  require(blocks < (int64_t{1} << 31), "a tensor of ", count,
          " elements is too large for one launch in 4 bits; split it");
  return static_cast<unsigned>(blocks);
}

void require_aligned_nf4(const char* what, const void* a, const void* b) {
  require(is_aligned(a) && is_aligned(b), what,
          " on a GPU needs memory that begins at a multiple of 16 bytes; copy the tensor");
}

}  // namespace

void nf4_quantize_cuda(const void* x, ElementType type, const Nf4Codes& to, float* scratch, Stream stream) {
  require_aligned_nf4(kNf4Quantize, x, to.codes);
  check_nf4_scratch(to, scratch);
  const bool is_nested = to.absmax == nullptr && to.offset != nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const unsigned blocks = nf4_grid(to.count, kNf4NestedBlock * kNf4Block);
  if (blocks > 0) {
    with_element(type, [&](auto element) {
      using Element = decltype(element);
      const auto* elements = static_cast<const Element*>(x);
      if (is_nested) {
        // Where the nested scales will be, the parts of the mean lie before.
        nf4_quantize_kernel<Element, true><<<blocks, kNf4Threads, 0, cuda_stream>>>(
            elements, to.count, to.codes, scratch, to.nested_absmax);
      } else {
        nf4_quantize_kernel<Element, false>
            <<<blocks, kNf4Threads, 0, cuda_stream>>>(elements, to.count, to.codes, to.absmax, nullptr);
      }
    });
    check_launch(kNf4Quantize);
  }
  if (!is_nested) return;
  const int64_t scales = nf4_blocks(to.count);
  nf4_offset_kernel<<<1, kPartialColumns, 0, cuda_stream>>>(to.nested_absmax, blocks, scales, to.offset);
  check_launch("the mean of scales");
  if (blocks == 0) return;
  nf4_scales_kernel<<<blocks, kNf4NestedBlock, 0, cuda_stream>>>(scratch, scales, to.nested_map, to.offset,
                                                                 to.nested_absmax, to.absmax_codes);
  check_launch("quantising scales");
}

void nf4_decode_cuda(const Nf4Codes& from, ElementType type, void* out, int64_t columns, int64_t stride,
                     Stream stream) {
  require_aligned_nf4(kNf4Decode, from.codes, out);
  check_nf4(from);
  check_nf4_rows(from, columns, stride);
  if (from.count == 0) return;
  const unsigned blocks = nf4_grid(from.count, kNf4Tile * (kNf4Threads / kNf4Lanes));
  const Nf4Rows rows{columns, stride, 1.0 / static_cast<double>(columns),
                     columns % 8 == 0 && stride % 8 == 0};
  with_element(type, [&](auto element) {
    using Element = decltype(element);
    auto* const to = static_cast<Element*>(out);
    if (columns == stride) {
      nf4_decode_kernel<Element, true>
          <<<blocks, kNf4Threads, 0, static_cast<cudaStream_t>(stream)>>>(from, to, rows);
    } else {
      nf4_decode_kernel<Element, false>
          <<<blocks, kNf4Threads, 0, static_cast<cudaStream_t>(stream)>>>(from, to, rows);
    }
  });
  check_launch(kNf4Decode);
}

}  // namespace pacer::kernels
