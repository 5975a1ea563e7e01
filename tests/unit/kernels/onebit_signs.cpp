// Rounding to signs and back on the CPU in every version that this machine can run, against a restatement:
// every count around a vector's length, memory that begins anywhere, and numbers that are none.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <pacer/kernels/cpu/onebit_signs.h>

#include "support/catch.h"
#include "support/samples.h"

namespace pacer::kernels::testing::onebit_signs {
namespace {

using pacer::testing::Samples;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSpecial[] = {0.0F,      -0.0F,      NAN,      kInfinity, -kInfinity,
                              kDenormal, -kDenormal, kLargest, -kLargest, 1e-40F};

using Round = void (*)(const SignRounding&);
using Decode = void (*)(const unsigned char*, int64_t, float, float*);

// The functions of one kind of processor.
struct Version {
  std::string name;
  Round round[2][2];  // by: l1, first
  Decode decode, decode_and_add;
};

template <ScaleNorm kNorm, bool kFirst>
void round_one_by_one(const SignRounding& r) {
  round_to_signs_one_by_one<kNorm, kFirst>(r);
}
template <bool kAdd>
void decode_one_by_one(const unsigned char* signs, int64_t count, float scale, float* values) {
  decode_signs_one_by_one<kAdd>(signs, count, scale, values);
}

#define PACER_ALL_OF(round, decode)                             \
  {{round<ScaleNorm::rms, false>, round<ScaleNorm::rms, true>}, \
   {round<ScaleNorm::l1, false>, round<ScaleNorm::l1, true>}},  \
      decode<false>, decode<true>

std::vector<Version> versions_here() {
  std::vector<Version> versions = {{"one by one", PACER_ALL_OF(round_one_by_one, decode_one_by_one)},
                                   {"chosen", PACER_ALL_OF(round_to_signs, decode_signs)}};
#if defined(__x86_64__)
  if (has_avx2_and_fma()) versions.push_back({"AVX2", PACER_ALL_OF(round_to_signs_avx2, decode_signs_avx2)});
  if (has_avx512()) versions.push_back({"AVX-512", PACER_ALL_OF(round_to_signs_avx512, decode_signs_avx512)});
#endif
  return versions;
}
#undef PACER_ALL_OF

// The arrays of a call, each beginning `shift` elements into its memory, with something behind it that must
// stay.
struct Arrays {
  static constexpr size_t kBehind = 40;
  size_t shift, count;
  std::vector<float> values, carried, columns;
  std::vector<unsigned char> signs;

  Arrays(size_t elements, size_t first, Samples& samples, double special)
      : shift(first), count(elements), signs((elements + 7) / 8 + first + kBehind, 0x5A) {
    for (std::vector<float>* array : {&values, &carried, &columns}) {
      array->resize(count + shift + kBehind);
      for (float& number : *array) {
        number = samples.chance(special) ? samples.one_of(kSpecial)
                                         : static_cast<float>(samples.sign() * samples.log_uniform(1e-3, 10));
      }
    }
    for (float& column : columns) column = std::abs(column);
  }

  SignRounding call(float scale) {
    return {values.data() + shift,       scale,
            static_cast<int64_t>(count), carried.data() + shift,
            columns.data() + shift,      signs.data() + shift};
  }

  // What the call is to leave.
  void restate(float scale, bool l1, bool first) {
    for (size_t i = 0; i < count; ++i) {
      const bool was_minus = carried[shift + i] < 0.0F;
      float sum = was_minus ? carried[shift + i] + scale : carried[shift + i] - scale;
      sum += values[shift + i];
      carried[shift + i] = sum;
      float& column = columns[shift + i];
      if (first) column = 0.0F;
      column = l1 ? column + std::fabs(sum) : std::fma(sum, sum, column);
      unsigned char& byte = signs[shift + i / 8];
      if (i % 8 == 0) byte = 0xFF;
      if (std::isless(sum, 0.0F)) byte = static_cast<unsigned char>(byte - (1 << (i % 8)));
    }
  }
};

// All NaN count as one.
bool same_numbers(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    const bool both_nan = std::isnan(a[i]) && std::isnan(b[i]);
    if (!both_nan && std::memcmp(&a[i], &b[i], sizeof(float)) != 0) return false;
  }
  return true;
}

void check(const Version& version, size_t count, size_t shift, float scale, double special,
           Samples& samples) {
  INFO(version.name << ", " << count << " elements, shift " << shift << ", scale " << scale);
  for (const bool l1 : {false, true}) {
    for (const bool first : {false, true}) {
      Arrays found(count, shift, samples, special), expected = found;
      version.round[l1][first](found.call(scale));
      expected.restate(scale, l1, first);
      REQUIRE(same_numbers(found.values, expected.values));
      REQUIRE(same_numbers(found.carried, expected.carried));
      REQUIRE(same_numbers(found.columns, expected.columns));
      REQUIRE(found.signs == expected.signs);
    }
  }
  for (const bool add : {false, true}) {
    Arrays found(count, shift, samples, special), expected = found;
    for (unsigned char& byte : found.signs) byte = static_cast<unsigned char>(samples.bits());
    const unsigned char* signs = found.signs.data() + shift;
    (add ? version.decode_and_add : version.decode)(signs, static_cast<int64_t>(count), scale,
                                                    found.values.data() + shift);
    for (size_t i = 0; i < count; ++i) {
      const float value = signs[i / 8] / (1 << i % 8) % 2 == 1 ? scale : -scale;
      float& number = expected.values[shift + i];
      number = add ? number + value : value;
    }
    REQUIRE(same_numbers(found.values, expected.values));
  }
}

}  // namespace

TEST_CASE("rounding to signs and back has the same bits in every version, for any count and alignment",
          "[kernels][onebit]") {
  Samples samples(21);
  for (const Version& version : versions_here()) {
    for (size_t count = 0; count < 70; ++count) check(version, count, count % 17, 0.5F, 0, samples);
    for (const size_t count : {127U, 128U, 129U, 2040U, 2047U, 2048U}) {
      for (size_t shift = 0; shift < 4; ++shift) check(version, count, shift, 0.25F, 0, samples);
    }
  }
}

TEST_CASE(
    "rounding to signs and back has the same bits in every version for zeros, infinities, NaN and denormals",
    "[kernels][onebit]") {
  Samples samples(22);
  for (const Version& version : versions_here()) {
    for (const float scale : {0.0F, 1.0F, kDenormal, kLargest, kInfinity, NAN}) {
      for (const size_t count : {1U, 7U, 8U, 16U, 33U, 2048U}) check(version, count, 0, scale, 0.3, samples);
    }
  }
}

}  // namespace pacer::kernels::testing::onebit_signs
