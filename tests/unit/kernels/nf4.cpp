// NF4 on the CPU: the book from its formula, codes and scales beside a plain restatement and beside what
// bitsandbytes makes of the same numbers, and all shapes of memory.
#include "support/catch.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include <pacer/core/error.h>

#include "support/kernels/nf4_reference.h"

namespace pacer::testing::kernels_nf4 {
namespace {

using kernels::BFloat16;
using kernels::ElementType;
using kernels::Float16;
using kernels::Nf4Codes;

// By halving: as exact as erfc.
double normal_quantile(double share) {
  double low = -10, high = 10;
  for (int i = 0; i < 200; ++i) {
    const double middle = (low + high) / 2;
    (std::erfc(-middle / std::sqrt(2.0)) / 2 < share ? low : high) = middle;
  }
  return (low + high) / 2;
}

// Quantiles at `count` shares from .9677083 on, of count + 1 that end at 1/2; in fp32 as their authors have
// them.
void add_quantiles(int count, float sign, std::vector<float>& to) {
  const float first = .9677083f, last = .5f, step = (last - first) / static_cast<float>(count);
  for (int i = 0; i < count; ++i) {
    const float share = i < (count + 1) / 2 ? std::fma(step, static_cast<float>(i), first)
                                            : std::fma(-step, static_cast<float>(count - i), last);
    to.push_back(sign * static_cast<float>(normal_quantile(static_cast<double>(share))));
  }
}

std::vector<BFloat16> in_bf16(const std::vector<float>& x) {
  std::vector<BFloat16> narrow;
  for (const float value : x) narrow.push_back(kernels::to_bfloat16(value));
  return narrow;
}
std::vector<Float16> in_f16(const std::vector<float>& x) {
  std::vector<Float16> narrow;
  for (const float value : x) narrow.push_back(kernels::to_float16(value));
  return narrow;
}
template <class Element>
std::vector<float> in_f32(const std::vector<Element>& x) {
  std::vector<float> wide;
  for (const Element value : x) wide.push_back(kernels::to_float(value));
  return wide;
}

Nf4Arrays quantized(const void* x, ElementType type, int64_t count, bool nested) {
  Nf4Arrays to(count, nested);
  kernels::nf4_quantize_cpu(x, type, to.view(), to.scales.data());
  return to;
}
Nf4Arrays quantized(const std::vector<float>& x, bool nested) {
  return quantized(x.data(), ElementType::f32, static_cast<int64_t>(x.size()), nested);
}

template <class Element>
std::vector<Element> decoded(Nf4Arrays& from, ElementType type) {
  std::vector<Element> values(static_cast<size_t>(from.count));
  kernels::nf4_decode_cpu(from.view(), type, values.data(), from.count, from.count, 0,
                          kernels::nf4_blocks(from.count));
  return values;
}
std::vector<float> decoded(Nf4Arrays& from) { return decoded<float>(from, ElementType::f32); }

template <class Element>
bool same_bytes(const std::vector<Element>& a, const std::vector<Element>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0);
}

double relative_error(const std::vector<float>& x, const std::vector<float>& y) {
  double squares = 0, errors = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double a = static_cast<double>(x[i]), b = static_cast<double>(y[i]);
    squares += a * a;
    errors += (a - b) * (a - b);
  }
  return std::sqrt(errors / squares);
}

template <class Element>
uint64_t fnv(const std::vector<Element>& list) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto* bytes = reinterpret_cast<const uint8_t*>(list.data());
  for (size_t i = 0; i < list.size() * sizeof(Element); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  return hash;
}

}  // namespace

TEST_CASE("the book of NF4 is its formula's, and thresholds are half-way", "[kernels][nf4]") {
  std::vector<float> book = {0.0f};
  add_quantiles(8, 1, book);
  add_quantiles(7, -1, book);
  std::sort(book.begin(), book.end());
  const float largest = book.back();
  for (size_t i = 0; i < 16; ++i) {
    CAPTURE(i);
    CHECK(kernels::kNf4Book[i] == book[i] / largest);
    if (i == 15) break;
    CHECK(kernels::kNf4Thresholds[i] == kNf4ReferenceThresholds[i]);
    // The exact mean of two floats lies between two others at most, which are as near.
    const float threshold = kernels::kNf4Thresholds[i];
    const double mean =
        (static_cast<double>(book[i] / largest) + static_cast<double>(book[i + 1] / largest)) / 2;
    const double off = std::fabs(static_cast<double>(threshold) - mean);
    CHECK(2 * off <= static_cast<double>(std::nextafter(std::fabs(threshold), 2.0f) - std::fabs(threshold)));
  }
  CHECK(kernels::kNf4Book[kernels::kNf4Zero] == 0.0f);
}

TEST_CASE("a code is the number of thresholds below, also by buckets", "[kernels][nf4]") {
  constexpr kernels::Nf4Buckets kBuckets = kernels::nf4_buckets();
  std::vector<float> values;
  const auto add_around = [&](float value) {
    for (int k = 0; k < 3; ++k) values.push_back(value = std::nextafter(value, -2.0f));
    for (int k = 0; k < 6; ++k) values.push_back(value = std::nextafter(value, 2.0f));
  };
  for (const float threshold : kNf4ReferenceThresholds) add_around(threshold);
  for (int edge = -30; edge <= 30; ++edge)
    add_around(static_cast<float>(edge) / 2 / kernels::kNf4BucketsOfOne);
  for (const float value : {-1.0f, 0.0f, -0.0f, 1.0f}) add_around(value);
  for (int i = -1000000; i <= 1000000; ++i) values.push_back(static_cast<float>(i) / 1e6f);
  for (const float value : values) {
    const uint32_t wanted = nf4_nearest(kNf4ReferenceThresholds.data(), 15, value);
    const uint32_t bucket = kernels::nf4_bucket(value) % 32;
    const uint32_t found = kBuckets.below[bucket] + (value > kBuckets.threshold[bucket] ? 1u : 0u);
    if (kernels::nf4_encode(value) != wanted || found != wanted) {
      CAPTURE(value, wanted, found);
      REQUIRE(kernels::nf4_encode(value) == wanted);
      REQUIRE(found == wanted);
    }
  }
}

TEST_CASE("all 16 values at a thousand scales keep their codes", "[kernels][nf4]") {
  std::vector<float> x;
  for (int k = 0; k < 1000; ++k) {
    const float scale = std::ldexp(1.0f + static_cast<float>(k * 37 % 997) / 1000, k % 200 - 100);
    for (size_t i = 0; i < 64; ++i)
      x.push_back(kernels::kNf4Book[(i * 7 + static_cast<size_t>(k)) % 16] * scale);
  }
  Nf4Arrays four_bits = quantized(x, false);
  REQUIRE(same_bytes(decoded(four_bits), x));
}

TEST_CASE("the dynamic map grows from -0.993 to 1 in seven decades", "[kernels][nf4]") {
  const auto& map = kernels::nf4_nested_map();
  for (size_t i = 0; i + 1 < map.size(); ++i) REQUIRE(map[i] < map[i + 1]);
  CHECK(map[kernels::kNf4NestedZero] == 0.0f);
  CHECK(map[255] == 1.0f);
  for (size_t i = 0; i < 127; ++i) CHECK(map[i] == -map[254 - i]);
  // From the middle outwards: decade d, from 10^(d - 7) to 10^(d - 6), in 2^d parts, of each the middle.
  size_t at = 128;
  for (int decade = 0; decade < 7; ++decade) {
    for (int i = 0; i < 1 << decade; ++i, ++at) {
      const double middle = .1 + .9 * (i + .5) / (1 << decade);
      CAPTURE(decade, i);
      CHECK(std::fabs(static_cast<double>(map[at]) / (middle * std::pow(10.0, decade - 6)) - 1) < 2e-7);
    }
  }
  CHECK(at == 255);
  // bitsandbytes' bits, where it has fused multiply-add.
  CHECK(fnv(std::vector<float>(map.begin(), map.end())) == 0xd677f22a96665bc4u);
}

TEST_CASE("codes and scales are those of the plain restatement, at all sizes", "[kernels][nf4]") {
  for (const int64_t count : kNf4Counts) {
    for (const bool nested : {false, true}) {
      CAPTURE(count, nested);
      const std::vector<float> x = nf4_numbers(count);
      Nf4Arrays found = quantized(x, nested);
      REQUIRE(found == nf4_reference(x, nested));
      const std::vector<BFloat16> bf16 = in_bf16(x);
      const std::vector<Float16> f16 = in_f16(x);
      REQUIRE(quantized(bf16.data(), ElementType::bf16, count, nested) ==
              nf4_reference(in_f32(bf16), nested));
      REQUIRE(quantized(f16.data(), ElementType::f16, count, nested) == nf4_reference(in_f32(f16), nested));
      const std::vector<float> wanted = nf4_values(found);
      REQUIRE(same_bytes(decoded(found), wanted));
      REQUIRE(same_bytes(decoded<BFloat16>(found, ElementType::bf16), in_bf16(wanted)));
      REQUIRE(same_bytes(decoded<Float16>(found, ElementType::f16), in_f16(wanted)));
    }
  }
}

TEST_CASE("the offset is the mean of the scales", "[kernels][nf4]") {
  for (const int64_t count : {int64_t{64}, int64_t{16448}, int64_t{300001}}) {
    const std::vector<float> x = nf4_numbers(count);
    const Nf4Arrays plain = quantized(x, false), nested = quantized(x, true);
    double sum = 0;
    for (const float scale : plain.scales) sum += static_cast<double>(scale);
    const double mean = sum / static_cast<double>(plain.scales.size());
    CHECK(std::fabs(static_cast<double>(nested.offset) / mean - 1) < 1.2e-7);
  }
}

TEST_CASE("scales near the largest float have a mean, too", "[kernels][nf4]") {
  std::vector<float> x(64 * 600, 3e38f);
  Nf4Arrays nested = quantized(x, true);
  CHECK(nested.offset == 3e38f);
  CHECK(decoded(nested) == x);
}

TEST_CASE("normal numbers lose .0920 of their norm, with double quantisation no more", "[kernels][nf4]") {
  std::vector<float> x = nf4_numbers(int64_t{1} << 21, 1);
  Nf4Arrays plain = quantized(x, false), nested = quantized(x, true);
  const double error = relative_error(x, decoded(plain));
  CHECK(std::fabs(error - .0920) < .0003);
  CHECK(std::fabs(relative_error(x, decoded(nested)) - error) < .0002);
}

TEST_CASE("a block of zeros has code 7 and stays zeros; what cannot be scaled does no harm",
          "[kernels][nf4]") {
  std::vector<float> x(256, 0.0f);
  for (size_t i = 0; i < 64; ++i) x[i] = static_cast<float>(i);
  x[130] = 2e-39f;  // of which 1 / x is infinite
  x[140] = -2e-39f;
  x[200] = -0.0f;
  Nf4Arrays found = quantized(x, false);
  for (size_t i = 32; i < 64; ++i) CHECK(found.codes[i] == 0x77);
  CHECK(found.scales[1] == 0.0f);
  const std::vector<float> values = decoded(found);
  for (size_t i = 64; i < 256; ++i) CHECK(std::fabs(values[i]) <= std::fabs(x[i]));
  CHECK(values[130] > 0);
  CHECK(values[140] < 0);

  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    x = nf4_numbers(256);
    x[70] = bad;
    Nf4Arrays plain = quantized(x, false);
    CHECK(kernels::bits_of(plain.scales[1]) == (std::isnan(bad) ? 0x7FC00000u : 0x7F800000u));
    const std::vector<float> back = decoded(plain);
    for (size_t i = 0; i < 256; ++i) CHECK(std::isnan(back[i]) == (i / 64 == 1));
    Nf4Arrays nested = quantized(x, true);
    for (const float value : decoded(nested)) CHECK(std::isnan(value));
  }
}

TEST_CASE("parts of any size have the bytes of the whole", "[kernels][nf4]") {
  constexpr int64_t kCount = 100003;
  const std::vector<float> x = nf4_numbers(kCount);
  for (const bool nested : {false, true}) {
    Nf4Arrays wanted = quantized(x, nested), found(kCount, nested);
    const std::vector<float> values = decoded(wanted);
    const int64_t blocks = kernels::nf4_blocks(kCount), nested_blocks = kernels::nf4_nested_blocks(kCount);
    std::mt19937 generator(5);
    const auto in_parts = [&](int64_t end, const auto& work) {
      for (int64_t done = 0; done < end;) {
        const int64_t part = std::min<int64_t>(end - done, 1 + generator() % 150);
        work(done, done + part);
        done += part;
      }
    };
    in_parts(blocks, [&](int64_t begin, int64_t end) {
      kernels::nf4_quantize_cpu(x.data(), ElementType::f32, found.view(), found.scales.data(), begin, end);
    });
    if (nested) {
      kernels::nf4_offset_cpu(found.scales.data(), found.view());
      in_parts(nested_blocks, [&](int64_t begin, int64_t end) {
        kernels::nf4_quantize_scales_cpu(found.scales.data(), found.view(), begin, end);
      });
    }
    REQUIRE(found == wanted);
    std::vector<float> out(values.size(), 7.0f);
    in_parts(blocks, [&](int64_t begin, int64_t end) {
      kernels::nf4_decode_cpu(found.view(), ElementType::f32, out.data(), kCount, kCount, begin, end);
    });
    REQUIRE(same_bytes(out, values));
  }
}

TEST_CASE("rows that lie apart leave what is between them alone", "[kernels][nf4]") {
  for (const auto& [rows, columns, stride] :
       {std::array<int64_t, 3>{5, 7, 9}, {1, 64, 80}, {40, 100, 101}, {3, 4096, 4112}, {200, 1, 3}}) {
    CAPTURE(rows, columns, stride);
    Nf4Arrays from = quantized(nf4_numbers(rows * columns), true);
    const std::vector<float> values = decoded(from);
    std::vector<float> out(static_cast<size_t>(rows * stride), 7.0f);
    const int64_t blocks = kernels::nf4_blocks(from.count), half = blocks / 2;
    for (const auto& [begin, end] : {std::pair{int64_t{0}, half}, {half, blocks}}) {
      kernels::nf4_decode_cpu(from.view(), ElementType::f32, out.data(), columns, stride, begin, end);
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < stride; ++column) {
        const float wanted = column < columns ? values[static_cast<size_t>(row * columns + column)] : 7.0f;
        REQUIRE(out[static_cast<size_t>(row * stride + column)] == wanted);
      }
    }
  }
}

// Made with bitsandbytes 0.49.2 on a CPU (quantize_4bit and dequantize_4bit, nf4, fp32). The scales add up
// without an error, so that the order of its mean does not matter.
TEST_CASE("bitsandbytes makes the same bytes of the same numbers", "[kernels][nf4]") {
  std::vector<float> x;
  for (int i = 0; i < 512 * 64; ++i) {
    const int scale = i / 64 * 29 % 64;
    x.push_back(static_cast<float>((i * 37 % 101 - 50) * (4096 + scale * scale)) / 0x1p18f);
  }
  Nf4Arrays plain = quantized(x, false), nested = quantized(x, true);
  const std::vector<uint8_t> first = {0x04, 0xc1, 0x6e, 0x29, 0xf3, 0xb0, 0x5d, 0x17, 0xe2, 0x9f, 0x3c,
                                      0x05, 0xd1, 0x8e, 0x2a, 0xf4, 0xc1, 0x6e, 0x18, 0xe3, 0xb0, 0x5d,
                                      0x17, 0xe2, 0x9f, 0x3b, 0x05, 0xd1, 0x8e, 0x2a, 0xf4, 0xc1};
  CHECK(std::vector<uint8_t>(plain.codes.begin(), plain.codes.begin() + 32) == first);
  CHECK(fnv(plain.codes) == 0xeef77dd9c4608e24u);
  CHECK(plain.scales[2] == 0x1.6c42p+0f);
  CHECK(fnv(plain.scales) == 0xd219cf4ed2052241u);
  CHECK(nested.codes == plain.codes);
  CHECK(nested.offset == 0x1.08c35cp+0f);
  CHECK(nested.nested_scales == std::vector<float>(2, 0x1.021248p-1f));
  const std::vector<uint8_t> first_scales = {35,  58, 238, 49,  220, 43,  205, 38,
                                             191, 36, 63,  255, 56,  235, 48,  218};
  CHECK(std::vector<uint8_t>(nested.scale_codes.begin(), nested.scale_codes.begin() + 16) == first_scales);
  CHECK(fnv(nested.scale_codes) == 0xeac6b2df658d7638u);
  CHECK(fnv(decoded(plain)) == 0xb3895338ada48095u);
  CHECK(fnv(decoded<BFloat16>(plain, ElementType::bf16)) == 0xaee536d32d8a71a6u);
  CHECK(fnv(decoded<Float16>(plain, ElementType::f16)) == 0x3869e99a7348a389u);
  CHECK(fnv(decoded(nested)) == 0xaf6f56e102f567b8u);
  CHECK(fnv(decoded<BFloat16>(nested, ElementType::bf16)) == 0xb487bd8d0f7af6fcu);
  CHECK(fnv(decoded<Float16>(nested, ElementType::f16)) == 0x614d3e90b70246bcu);
}

TEST_CASE("numbers in 4 bits without the memory that they need are refused", "[kernels][nf4]") {
  const auto says = [](const std::string& part) { return Catch::Matchers::ContainsSubstring(part); };
  std::vector<float> x = nf4_numbers(100), out(100, 7.0f);
  const auto quantize = [&](const Nf4Codes& to, float* scratch) {
    kernels::nf4_quantize_cpu(x.data(), ElementType::f32, to, scratch);
  };
  Nf4Arrays plain(100, false), nested(100, true);
  Nf4Codes wrong = plain.view();
  wrong.codes = nullptr;
  CHECK_THROWS_WITH(quantize(wrong, nullptr), says("their codes"));
  wrong = plain.view();
  wrong.absmax_codes = nested.scale_codes.data();
  CHECK_THROWS_WITH(quantize(wrong, nullptr), says("give one of absmax and absmax_codes"));
  wrong = plain.view();
  wrong.absmax = nullptr;
  CHECK_THROWS_AS(quantize(wrong, nullptr), InvalidArgument);
  wrong = nested.view();
  wrong.offset = nullptr;
  CHECK_THROWS_WITH(quantize(wrong, nested.scales.data()), says("nested_absmax, nested_map and offset"));
  CHECK_THROWS_WITH(quantize(nested.view(), nullptr), says("a scale of each block of 64"));
  CHECK_THROWS_WITH(kernels::nf4_offset_cpu(nested.scales.data(), plain.view()), says("instead of absmax"));
  CHECK_THROWS_WITH(kernels::nf4_quantize_scales_cpu(nested.scales.data(), plain.view(), 0, 1),
                    says("instead of absmax"));
  CHECK(plain == Nf4Arrays(100, false));
  CHECK(nested == Nf4Arrays(100, true));
  quantize(plain.view(), nullptr);
  for (const auto& [columns, stride] : {std::pair<int64_t, int64_t>{0, 10}, {10, 9}}) {
    CHECK_THROWS_WITH(
        kernels::nf4_decode_cpu(plain.view(), ElementType::f32, out.data(), columns, stride, 0, 2),
        says("to rows of " + std::to_string(columns)));
  }
  CHECK(out == std::vector<float>(100, 7.0f));
}

}  // namespace pacer::testing::kernels_nf4
