// The CPU side of NF4. Every decision is made on 16 or 64 values at once: thresholds are counted, and a
// block's 16 possible values are looked up, without a branch.
#include <pacer/kernels/nf4.h>

#include <algorithm>
#include <cmath>

#include <pacer/core/error.h>
#include <pacer/core/reduction_order.h>
#include <pacer/kernels/cpu/nf4_decode.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/math/adam_storage.h>

namespace pacer::kernels {
namespace {

constexpr int64_t kNf4Strip = 64;  // blocks that are worked on at once, in the fastest cache

template <class Element>
PACER_TARGET_CLONES void widen_nf4(const Element* x, int64_t count, float* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = load(x[i]);
}

PACER_TARGET_CLONES void encode_nf4(const float* values, int64_t blocks, float* scales, uint8_t* codes) {
  for (int64_t block = 0; block < blocks; ++block, values += kNf4Block, codes += kNf4Block / 2) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < kNf4Block; ++i) largest = std::max(largest, bits_of(values[i]) & 0x7FFFFFFFu);
    scales[block] = float_of(magnitude_bits(float_of(largest)));
    if (!is_finite_amax(largest)) {
      std::fill_n(codes, kNf4Block / 2, static_cast<uint8_t>(kNf4Zero << 4 | kNf4Zero));
      continue;
    }
    const float inverse = nf4_inverse(scales[block]);
    uint8_t single[kNf4Block];
#pragma omp simd
    for (int64_t i = 0; i < kNf4Block; ++i) {
      single[i] = static_cast<uint8_t>(nf4_encode(mul_(values[i], inverse)));
    }
#pragma omp simd
    for (int64_t i = 0; i < kNf4Block / 2; ++i) {
      codes[i] = static_cast<uint8_t>(single[2 * i] << 4 | single[2 * i + 1]);
    }
  }
}

template <class Element>
void quantize_nf4(const Element* x, const Nf4Codes& to, float* scales, int64_t begin, int64_t end) {
  float values[kNf4Strip * kNf4Block];
  const int64_t whole = std::min(end, to.count / kNf4Block);
  for (int64_t block = begin; block < whole; block += kNf4Strip) {
    const int64_t blocks = std::min(kNf4Strip, whole - block);
    widen_nf4(x + block * kNf4Block, blocks * kNf4Block, values);
    encode_nf4(values, blocks, scales + block, to.codes + block * kNf4Block / 2);
  }
  if (whole == end) return;
  const int64_t first = whole * kNf4Block;
  uint8_t codes[kNf4Block / 2];
  std::fill_n(values, kNf4Block, 0.0f);
  widen_nf4(x + first, to.count - first, values);
  encode_nf4(values, 1, scales + whole, codes);
  std::copy_n(codes, nf4_bytes(to.count - first), to.codes + first / 2);
}

PACER_TARGET_CLONES void encode_nf4_scales(const float* scales, int64_t count, float offset,
                                           const float* borders, float& nested_absmax, uint8_t* codes) {
  float distances[kNf4NestedBlock];
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    distances[i] = scales[i] - offset;
    largest = std::max(largest, bits_of(distances[i]) & 0x7FFFFFFFu);
  }
  nested_absmax = float_of(magnitude_bits(float_of(largest)));
  if (!is_finite_amax(largest)) {
    std::fill_n(codes, count, static_cast<uint8_t>(kNf4NestedZero));
    return;
  }
  const float inverse = nf4_inverse(nested_absmax);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<uint8_t>(nf4_nested_encode(borders, mul_(distances[i], inverse)));
  }
}

PACER_TARGET_CLONES void decode_nf4_scales(const uint8_t* codes, int64_t count, const float* map,
                                           float nested_absmax, float offset, float* scales) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) scales[i] = nf4_nested_decode(map[codes[i]], nested_absmax, offset);
}

// The 16 values of each block, rounded.
template <class Element>
PACER_TARGET_CLONES void make_nf4_tables(const float* scales, int64_t blocks, Element* tables) {
  float products[kNf4Strip * 16];
  for (int64_t block = 0; block < blocks; ++block) {
#pragma omp simd
    for (int64_t i = 0; i < 16; ++i) products[16 * block + i] = mul_(kNf4Book[i], scales[block]);
  }
  // clang's analyzer does not see that there are as many products.
#pragma omp simd
  for (int64_t i = 0; i < 16 * blocks; ++i)
    store(products[i], tables[i]);  // NOLINT(clang-analyzer-core.CallAndMessage)
}

// The scales of `count` blocks, which lie in one nested block; in `scratch` where they have to be decoded.
const float* nf4_scales(const Nf4Codes& from, int64_t block, int64_t count, float* scratch) {
  if (from.absmax != nullptr) return from.absmax + block;
  decode_nf4_scales(from.absmax_codes + block, count, from.nested_map,
                    from.nested_absmax[block / kNf4NestedBlock], *from.offset, scratch);
  return scratch;
}

// Where rows lie apart: the next `count` elements, of which the first is number `first`.
template <class Element>
void scatter_nf4(const Element* values, int64_t first, int64_t count, int64_t columns, int64_t stride,
                 Element* out) {
  for (int64_t done = 0; done < count;) {
    const int64_t row = (first + done) / columns, column = (first + done) % columns;
    const int64_t some = std::min(count - done, columns - column);
    std::copy_n(values + done, some, out + row * stride + column);
    done += some;
  }
}

template <class Element>
void decode_nf4(const Nf4Codes& from, Element* out, int64_t columns, int64_t stride, int64_t begin,
                int64_t end) {
  float scratch[kNf4Strip];
  Element tables[kNf4Strip * 16];
  Element values[kNf4Strip * kNf4Block];
  for (int64_t block = begin; block < end;) {
    const int64_t blocks = std::min(kNf4Strip - block % kNf4Strip, end - block);
    const int64_t first = block * kNf4Block, count = std::min(blocks * kNf4Block, from.count - first);
    make_nf4_tables(nf4_scales(from, block, blocks, scratch), blocks, tables);
    Element* to = stride == columns ? out + first : values;
    decode_nf4_blocks(from.codes + first / 2, tables, count, to);
    if (stride != columns) scatter_nf4(values, first, count, columns, stride, out);
    block += blocks;
  }
}

void check_nf4_nested(const Nf4Codes& to, const float* scratch) {
  check_nf4_scratch(to, scratch);
  require(to.absmax == nullptr && to.offset != nullptr,
          "scales are quantised themselves only with double quantisation: give offset instead of absmax");
}

}  // namespace

const std::array<float, 256>& nf4_nested_map() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> map{};
    size_t size = 0;
    for (int decade = 0; decade < 7; ++decade) {
      const int count = 1 << decade;  // of values between .1 and 1, each in the middle of its part
      const float step = (1.0f - 0.1f) / static_cast<float>(count);
      const auto border = [&](int i) {
        const bool is_low = i < (count + 1) / 2;
        return is_low ? fma_(step, static_cast<float>(i), 0.1f)
                      : fma_(-step, static_cast<float>(count - i), 1.0f);
      };
      const auto scale = static_cast<float>(std::pow(10.0, decade - 6));
      for (int i = 0; i < count; ++i) {
        const float value = mul_(scale, (border(i) + border(i + 1)) / 2.0f);
        map[size++] = value;
        map[size++] = -value;
      }
    }
    map[size++] = 0.0f;
    map[size++] = 1.0f;
    std::sort(map.begin(), map.end());
    return map;
  }();
  return values;
}

void check_nf4(const Nf4Codes& codes) {
  require(codes.count >= 0, "numbers in 4 bits cannot be ", codes.count, " in number");
  if (codes.count == 0) return;
  require(codes.codes != nullptr, "numbers in 4 bits need memory for their codes");
  require((codes.absmax == nullptr) != (codes.absmax_codes == nullptr),
          "numbers in 4 bits have scales either in fp32 or, with double quantisation, in 8 bits: give one of "
          "absmax and absmax_codes");
  require(codes.absmax != nullptr ||
              (codes.nested_absmax != nullptr && codes.nested_map != nullptr && codes.offset != nullptr),
          "scales in 8 bits need nested_absmax, nested_map and offset");
}

void check_nf4_scratch(const Nf4Codes& to, const float* scratch) {
  check_nf4(to);
  require(to.count == 0 || to.absmax != nullptr || scratch != nullptr,
          "quantising to 4 bits with double quantisation needs memory for a scale of each block of 64");
}

void check_nf4_rows(const Nf4Codes& codes, int64_t columns, int64_t stride) {
  require(codes.count == 0 || (columns >= 1 && stride >= columns),
          "numbers in 4 bits cannot be decoded to rows of ", columns, " that begin every ", stride,
          " elements");
}

void nf4_quantize_cpu(const void* x, ElementType type, const Nf4Codes& to, float* scratch, int64_t begin,
                      int64_t end) {
  check_nf4_scratch(to, scratch);
  float* const scales = to.absmax != nullptr ? to.absmax : scratch;
  const FullDenormals full_denormals;
  with_element(type, [&](auto element) {
    quantize_nf4(static_cast<const decltype(element)*>(x), to, scales, begin, end);
  });
}

void nf4_offset_cpu(const float* scratch, const Nf4Codes& to) {
  check_nf4_nested(to, scratch);
  const FullDenormals full_denormals;
  const int64_t scales = nf4_blocks(to.count), blocks = nf4_nested_blocks(to.count);
  double columns[kPartialColumns] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kNf4NestedBlock;
    double sums[kNf4NestedBlock] = {};
    std::copy_n(scratch + first, std::min(kNf4NestedBlock, scales - first), sums);
    columns[block % kPartialColumns] += static_cast<double>(nf4_mean_of_block(fold(sums, kNf4NestedBlock)));
  }
  *to.offset = nf4_offset(fold(columns, kPartialColumns), scales);
}

void nf4_quantize_scales_cpu(const float* scratch, const Nf4Codes& to, int64_t begin, int64_t end) {
  check_nf4_nested(to, scratch);
  const FullDenormals full_denormals;
  float borders[kNf4NestedBorders];
  for (int i = 0; i < kNf4NestedBorders; ++i) borders[i] = nf4_nested_border(to.nested_map, i);
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kNf4NestedBlock;
    const int64_t count = std::min(kNf4NestedBlock, nf4_blocks(to.count) - first);
    encode_nf4_scales(scratch + first, count, *to.offset, borders, to.nested_absmax[block],
                      to.absmax_codes + first);
  }
}

void nf4_quantize_cpu(const void* x, ElementType type, const Nf4Codes& to, float* scratch) {
  nf4_quantize_cpu(x, type, to, scratch, 0, nf4_blocks(to.count));
  if (to.absmax != nullptr || to.offset == nullptr) return;
  nf4_offset_cpu(scratch, to);
  nf4_quantize_scales_cpu(scratch, to, 0, nf4_nested_blocks(to.count));
}

void nf4_decode_cpu(const Nf4Codes& from, ElementType type, void* out, int64_t columns, int64_t stride,
                    int64_t begin, int64_t end) {
  check_nf4(from);
  check_nf4_rows(from, columns, stride);
  const FullDenormals full_denormals;
  with_element(type, [&](auto element) {
    decode_nf4(from, static_cast<decltype(element)*>(out), columns, stride, begin, end);
  });
}

}  // namespace pacer::kernels
