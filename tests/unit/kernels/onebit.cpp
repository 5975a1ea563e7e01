// The kernels of the 1-bit exchange: which bit says what, what becomes of special numbers, that padding has
// no influence whatever lies in it, and decoding against plain loops.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/onebit.h>

#include "support/catch.h"
#include "support/kernels/onebit_reference.h"
#include "support/samples.h"

namespace pacer::kernels::testing::onebit {
namespace {

using pacer::testing::OneBitRules;
using pacer::testing::OneBitTextbook;
using pacer::testing::Samples;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kDenormal = std::numeric_limits<float>::denorm_min();

// The memory of one side of an exchange.
struct Memory {
  OneBitRows rows;
  ScaleNorm norm = ScaleNorm::rms;
  bool rows_scaled = false;
  std::vector<float> carried, scales;
  std::vector<unsigned char> signs;
  std::vector<double> sums;

  explicit Memory(OneBitRows cut, ScaleNorm scale = ScaleNorm::rms, bool by_rows = false)
      : rows(std::move(cut)), norm(scale), rows_scaled(by_rows) {
    const auto extent = static_cast<size_t>(rows.extent);
    carried.assign(extent, 0.0F);
    scales.assign(static_cast<size_t>(rows_scaled ? rows.count() : 1), 0.0F);
    signs.assign(extent / 8, 0);
    sums.assign(static_cast<size_t>(rows_scaled ? rows.count() : rows.units()), -1.0);
  }

  OneBitSide side() {
    return {rows.pieces.data(), rows.first.data(), rows.count(), rows.extent, carried.data(),
            scales.data(),      rows_scaled,       norm,         signs.data()};
  }

  // `values`: of the whole extent.
  void compress(const std::vector<float>& values) {
    const auto copy_row = [&](int64_t row, int64_t width, float* of_row) {
      std::copy_n(values.data() + row * kOneBitRow, width, of_row);
    };
    for (int64_t unit = 0; unit < rows.units(); ++unit) {
      onebit_compress_cpu(side(), copy_row, unit, sums.data());
    }
  }

  std::vector<float> errors() {
    std::vector<float> errors(carried.size(), 7.0F);
    for (int64_t row = 0; row < rows.count(); ++row) {
      onebit_errors_cpu(side(), row, errors.data() + row * kOneBitRow);
    }
    return errors;
  }

  bool is_plus(int64_t i) const { return ((signs[static_cast<size_t>(i / 8)] >> (i % 8)) & 1) != 0; }
};

template <class Value>
bool same_memory(const std::vector<Value>& a, const std::vector<Value>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Value)) == 0);
}

// One message for each chunk, all with the same scale.
OneBitMessages wrap(std::vector<unsigned char>& memory, const std::vector<unsigned char>& signs,
                    float scale) {
  const OneBitHeader header{scale, 0, 0, 0};
  memory.resize(sizeof header + signs.size());
  std::memcpy(memory.data(), &header, sizeof header);
  std::copy(signs.begin(), signs.end(), memory.begin() + sizeof header);
  const auto chunk = static_cast<int64_t>(8 * signs.size());
  return {memory.data(), static_cast<int64_t>(memory.size()), 1, chunk, false};
}

// Packs the words (bit 1: plus) and decodes them again; true if both show the words' bits.
template <class Word>
bool survives(const std::vector<Word>& words) {
  constexpr size_t kBits = 8 * sizeof(Word);
  std::vector<float> values(kBits * words.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = (words[i / kBits] >> (i % kBits)) & 1 ? 0.5F : -3.0F;
  Memory memory(OneBitLayout({static_cast<int64_t>(values.size())}, 1).rows());
  memory.compress(values);
  // The machine's bytes lie least significant first, as those of the signs.
  if (std::memcmp(memory.signs.data(), words.data(), memory.signs.size()) != 0) return false;
  std::vector<unsigned char> message;
  std::vector<float> decoded(values.size());
  decode_buffer_cpu(wrap(message, memory.signs, 2.5F), 0, memory.rows.extent, decoded.data());
  for (float& value : values) value = value < 0 ? -2.5F : 2.5F;
  return same_memory(decoded, values);
}

// Flush-to-zero and denormals-are-zero, as programs set them to run faster.
struct Mode {
#if defined(__SSE2__)
  explicit Mode(bool flush) { _mm_setcsr(flush ? saved | 0x8040 : saved); }
  ~Mode() { _mm_setcsr(saved); }
  const unsigned saved = _mm_getcsr();
#else
  explicit Mode(bool) {}
#endif
};

}  // namespace

TEST_CASE("P2: every 16-bit pattern of signs, and any word, survives packing", "[kernels][onebit]") {
  std::vector<uint16_t> patterns(1 << 16);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  CHECK(survives(patterns));
  Samples samples(1);
  for (int part = 0; part < 125; ++part) {
    std::vector<uint64_t> words(4000);
    for (uint64_t& word : words) word = samples.bits();
    REQUIRE(survives(words));
  }
}

TEST_CASE("element 8j + b is bit b of byte j", "[kernels][onebit]") {
  for (size_t minus = 0; minus < 2176; ++minus) {
    Memory memory(OneBitLayout({2176}, 1).rows());
    std::vector<float> values(2176, 1.0F);
    values[minus] = -1;
    memory.compress(values);
    std::vector<unsigned char> expected(2176 / 8, 0xFF);
    expected[minus / 8] = static_cast<unsigned char>(0xFF - (1 << (minus % 8)));
    REQUIRE(memory.signs == expected);
  }
}

TEST_CASE("zeros and NaN of either sign are plus, the smallest numbers have their own", "[kernels][onebit]") {
  const float values[] = {0.0F,      -0.0F,      NAN,        std::copysign(NAN, -1.0F),
                          kDenormal, -kDenormal, -kInfinity, 1e38F};
  const bool is_plus[] = {true, true, true, true, true, false, false, true};
  std::vector<float> numbers(128, -1.0F);
  std::copy(std::begin(values), std::end(values), numbers.begin() + 3);
  Memory memory(OneBitLayout({128}, 1).rows());
  for (const bool flush : {false, true}) {
    std::fill(memory.carried.begin(), memory.carried.end(), 0.0F);
    {
      const Mode mode(flush);
      memory.compress(numbers);
    }
    for (size_t i = 0; i < std::size(values); ++i) {
      INFO(values[i]);
      CHECK(memory.is_plus(static_cast<int64_t>(3 + i)) == is_plus[i]);
      CHECK(with_sign_of(values[i], 2.0F) == (is_plus[i] ? 2.0F : -2.0F));
    }
  }
  CHECK(bits_of(decode_sign(1, 3.5F)) == bits_of(3.5F));
  CHECK(bits_of(decode_sign(0, 3.5F)) == bits_of(-3.5F));
}

TEST_CASE("a scale is the root of the mean square or the mean magnitude of real elements",
          "[kernels][onebit]") {
  CHECK(onebit_scale(ScaleNorm::rms, 0.0, 0) == 0);
  CHECK(onebit_scale(ScaleNorm::l1, NAN, 0) == 0);
  CHECK(onebit_scale(ScaleNorm::rms, 12.0, 3) == 2);
  CHECK(onebit_scale(ScaleNorm::l1, 12.0, 3) == 4);
  CHECK(onebit_scale(ScaleNorm::rms, 2.0, 1) == static_cast<float>(std::sqrt(2.0)));
  CHECK(onebit_scale(ScaleNorm::l1, 1e300, int64_t{1} << 40) == kInfinity);
  CHECK(add_to_scale(ScaleNorm::rms, 1.0F + 0x1p-12F, -1.0F) == 0x1p-11F + 0x1p-24F);  // one rounding
  CHECK(add_to_scale(ScaleNorm::l1, -3.0F, 1.0F) == 4);
  CHECK(onebit_error(5.0F, 2.0F) == 3);
  CHECK(onebit_error(-5.0F, 2.0F) == -3);
  CHECK(onebit_error(0.0F, 2.0F) == -2);
  CHECK(onebit_message_bytes(1280, false) == 16 + 160);
  CHECK(onebit_message_bytes(4096, true) == 16 + 16 + 512);
  CHECK(onebit_message_bytes(4 * 2048, true) == 16 + 16 + 1024);
  CHECK(onebit_message_bytes(5 * 2048, true) == 16 + 32 + 1280);
}

TEST_CASE("P2: whatever lies between tensors, the real elements' results are the textbook's",
          "[kernels][onebit]") {
  const std::vector<int64_t> counts = {1, 0, 127, 129, 2047, 0, 3000, 128, 40000, 5, 0};
  Samples samples(7);
  const float garbage[] = {NAN, -NAN, kInfinity, -kInfinity, 1e30F, -1e30F, -kDenormal, 0.0F};
  for (const ScaleNorm norm : {ScaleNorm::rms, ScaleNorm::l1}) {
    for (const bool by_rows : {false, true}) {
      const OneBitLayout layout(counts, 1);
      OneBitRules rules;
      rules.counts = counts;
      rules.l1 = norm == ScaleNorm::l1;
      OneBitTextbook<float> textbook(rules);
      REQUIRE(textbook.length() == layout.length());
      std::vector<char> is_real(static_cast<size_t>(layout.length()), 0);
      for (size_t t = 0; t < counts.size(); ++t) {
        std::fill_n(is_real.begin() + layout.offset(t), counts[t], 1);
      }
      Memory clean(layout.rows(), norm, by_rows), dirty(layout.rows(), norm, by_rows);
      std::vector<float> error(is_real.size(), 0.0F);
      for (int call = 0; call < 5; ++call) {
        std::vector<float> values(is_real.size(), 0.0F), disturbed(values.size()), sum(values.size());
        for (size_t i = 0; i < values.size(); ++i) {
          if (is_real[i]) values[i] = static_cast<float>(samples.sign() * samples.uniform());
          disturbed[i] = is_real[i] ? values[i] : samples.one_of(garbage);
          // Also what was carried there before must not come back.
          if (!is_real[i]) dirty.carried[i] = samples.one_of(garbage);
          sum[i] = values[i] + error[i];
        }
        clean.compress(values);
        dirty.compress(disturbed);
        REQUIRE(same_memory(dirty.carried, sum));
        REQUIRE(same_memory(dirty.carried, clean.carried));
        REQUIRE(same_memory(dirty.signs, clean.signs));
        REQUIRE(same_memory(dirty.sums, clean.sums));
        const size_t width = by_rows ? 2048 : 32768;
        for (size_t i = 0; i < dirty.sums.size(); ++i) {
          const size_t end = std::min(sum.size(), (i + 1) * width);
          REQUIRE(dirty.sums[i] == textbook.sum_of(sum, i * width, end));
        }
        for (float& scale : dirty.scales) scale = static_cast<float>(samples.uniform());
        clean.scales = dirty.scales;
        for (size_t i = 0; i < sum.size(); ++i) {
          const float scale = dirty.scales[by_rows ? i / 2048 : 0];
          REQUIRE(dirty.is_plus(static_cast<int64_t>(i)) == !(sum[i] < 0));
          error[i] = is_real[i] ? sum[i] - (sum[i] < 0 ? -scale : scale) : 0.0F;
          if (!is_real[i]) dirty.carried[i] = samples.one_of(garbage);
        }
        REQUIRE(same_memory(dirty.errors(), error));
      }
    }
  }
}

TEST_CASE("messages are decoded as plain loops read them", "[kernels][onebit]") {
  Samples samples(11);
  for (int run = 0; run < 300; ++run) {
    const bool by_rows = samples.chance(0.5);
    const int64_t world_size = 1 + samples.below(8), chunk = (by_rows ? 2048 : 128) * (1 + samples.below(3));
    const int64_t stride = onebit_message_bytes(chunk, by_rows);
    std::vector<unsigned char> memory(static_cast<size_t>(world_size * stride));
    for (unsigned char& byte : memory) byte = static_cast<unsigned char>(samples.bits());
    // What scale and sign element i of message k has.
    const auto value = [&](int64_t k, int64_t i) {
      const unsigned char* message = memory.data() + k * stride;
      float scale;
      std::memcpy(&scale, message + (by_rows ? 16 + 4 * (i / 2048) : 0), 4);
      const unsigned char byte = message[stride - chunk / 8 + i / 8];
      return byte / (1 << (i % 8)) % 2 == 1 ? scale : -scale;
    };
    for (int64_t k = 0; k < world_size; ++k) {
      for (int64_t i = 0; i < (by_rows ? 4 + chunk / 2048 : 1); ++i) {
        const auto scale = static_cast<float>(samples.uniform());
        std::memcpy(memory.data() + k * stride + 4 * i, &scale, 4);
      }
    }
    const OneBitMessages messages{memory.data(), stride, world_size, chunk, by_rows};
    const auto random_range = [&](int64_t length) {
      const int64_t begin = samples.below(length / 8), end = begin + samples.below(length / 8 - begin + 1);
      return std::pair<int64_t, int64_t>(8 * begin, 8 * end);
    };
    const auto [begin, end] = random_range(world_size * chunk);
    std::vector<float> decoded(static_cast<size_t>(end - begin)), expected;
    decode_buffer_cpu(messages, begin, end - begin, decoded.data());
    for (int64_t i = begin; i < end; ++i) expected.push_back(value(i / chunk, i % chunk));
    REQUIRE(same_memory(decoded, expected));

    const auto [from, to] = random_range(chunk);
    std::vector<float> mean(static_cast<size_t>(to - from)), sums;
    decode_mean_cpu(messages, from, to - from, mean.data());
    for (int64_t i = from; i < to; ++i) {
      const auto average = static_cast<float>(1.0 / static_cast<double>(world_size));
      float sum = value(0, i) * average;
      for (int64_t k = 1; k < world_size; ++k) sum = sum + value(k, i) * average;
      sums.push_back(sum);
    }
    REQUIRE(same_memory(mean, sums));
  }
}

TEST_CASE("errors of denormals are computed in full whatever the caller's mode", "[kernels][onebit]") {
  std::vector<float> values(128);
  for (size_t i = 0; i < values.size(); ++i) values[i] = (i % 2 == 0 ? 1.0F : -1.0F) * (1e-38F + i * 3e-41F);
  Memory full(OneBitLayout({128}, 1).rows(), ScaleNorm::l1), flushed = full;
  std::vector<float> full_errors, flushed_errors;
  for (int call = 0; call < 3; ++call) {
    full.compress(values);
    full.scales[0] = onebit_scale(full.norm, full.sums[0], 128);
    full_errors = full.errors();
    const Mode mode(true);
    flushed.compress(values);
    flushed.scales[0] = full.scales[0];
    flushed_errors = flushed.errors();
  }
  CHECK(same_memory(full.carried, flushed.carried));
  CHECK(same_memory(full.sums, flushed.sums));
  CHECK(same_memory(full_errors, flushed_errors));
}

}  // namespace pacer::kernels::testing::onebit
