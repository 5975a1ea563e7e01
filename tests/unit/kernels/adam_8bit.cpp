// Moments in 8 bits: their codes against a restatement in fp64, known answers, and the loop that decodes, updates and
// encodes against the same element by element.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <pacer/kernels/adam_8bit.h>

#include "support/catch.h"
#include "support/kernels/coded_arrays.h"

namespace pacer::kernels::testing {
namespace {

struct Coded {
  std::vector<int> codes;
  std::vector<double> scales;
  std::vector<float> values;  // decoded
};

template <class Code>
Coded coded_as(Moment moment, const std::vector<float>& values) {
  const auto count = static_cast<int64_t>(values.size());
  std::vector<Code> codes(values.size() + 1, Code{77});
  std::vector<uint16_t> scales((values.size() + 31) / 32 + 1, 0x1234);
  encode_moments_cpu(moment, values.data(), count, codes.data(), scales.data());
  REQUIRE(codes.back() == Code{77});
  REQUIRE(scales.back() == 0x1234);
  Coded coded;
  coded.values.resize(values.size());
  decode_moments_cpu(moment, codes.data(), scales.data(), count, coded.values.data());
  codes.pop_back(), scales.pop_back();
  coded.codes.assign(codes.begin(), codes.end());
  for (const uint16_t bits : scales) coded.scales.push_back(to_float(Float16{bits}));
  return coded;
}
Coded coded(Moment moment, const std::vector<float>& values) {
  return moment == Moment::first ? coded_as<int8_t>(moment, values) : coded_as<uint8_t>(moment, values);
}

// The scale of a group as the headers say it, from exponents instead of bits.
double scale_of(double largest) {
  if (largest < std::ldexp(1, -32)) return 0;
  if (largest >= 65504) return 65504;
  const bool is_coarse = largest < std::ldexp(1, -14);
  const double spacing = std::ldexp(1, is_coarse ? -24 : std::ilogb(largest) - 10);
  return (is_coarse ? std::ceil(largest / spacing) : std::nearbyint(largest / spacing)) * spacing;
}

}  // namespace

TEST_CASE("codes and scales are those of the rule in fp64", "[kernels][adam8]") {
  Samples samples(1);
  for (const Moment moment : {Moment::first, Moment::second}) {
    for (const size_t count : {1, 2, 31, 32, 33, 64, 1000}) {
      for (int repeat = 0; repeat < 60; ++repeat) {
        const double largest = samples.log_uniform(1e-9, 1e5), narrow = samples.log_uniform(1e-6, 1);
        std::vector<float> values;
        for (size_t i = 0; i < count; ++i) {
          const double x = samples.sign() * largest * samples.log_uniform(narrow, 1);
          values.push_back(static_cast<float>(moment == Moment::first ? x : x * x));
        }
        const Coded got = coded(moment, values);
        for (size_t i = 0; i < count; ++i) {
          const size_t begin = i / 32 * 32, end = std::min(begin + 32, count);
          double of_group = 0;
          const auto measure = [&](size_t k) {
            return moment == Moment::first ? std::abs(double{values[k]}) : std::sqrt(double{values[k]});
          };
          for (size_t k = begin; k < end; ++k)
            of_group = std::max(of_group, double{static_cast<float>(measure(k))});
          const double scale = scale_of(of_group);
          INFO("element " << i << " of " << count << ", largest " << of_group);
          REQUIRE(got.scales[i / 32] == scale);
          if (scale == 0) {
            REQUIRE(got.codes[i] == 0);
            continue;
          }
          const double y = std::min(measure(i) / scale, 1.0);
          const double at_least = y > 0 ? 1 : 0;
          const double magnitude =
              moment == Moment::first ? 127 * 2 * y / (1 + y) : std::max(255 * y, at_least);
          const double wanted =
              moment == Moment::first ? std::copysign(magnitude, double{values[i]}) : magnitude;
          REQUIRE(std::abs(got.codes[i] - wanted) <= 0.5 + 1e-4);
          const double z = std::abs(got.codes[i]) / 127.0, s = got.codes[i] / 255.0 * scale;
          const double back =
              moment == Moment::first ? std::copysign(z / (2 - z) * scale, double(got.codes[i])) : s * s;
          REQUIRE(std::abs(got.values[i] - back) <= 4e-7 * std::abs(back));
        }
      }
    }
  }
}

TEST_CASE("groups whose codes are known have them", "[kernels][adam8]") {
  using Codes = std::vector<int>;
  const Coded zeros = coded(Moment::first, {0, -0.0f, 0});
  CHECK(zeros.codes == Codes{0, 0, 0});
  CHECK(zeros.scales == std::vector<double>{0});
  CHECK(zeros.values == std::vector<float>{0, 0, 0});
  CHECK(coded(Moment::second, std::vector<float>(33)).scales == std::vector<double>{0, 0});

  // The largest has the last code, and comes back as it was where fp16 has it.
  const Coded alone = coded(Moment::first, {-0.375f});
  CHECK(alone.codes == Codes{-127});
  CHECK(alone.values == std::vector<float>{-0.375f});
  const Coded squares = coded(Moment::second, {0.140625f, 0});
  CHECK(squares.codes == Codes{255, 0});
  CHECK(squares.values == std::vector<float>{0.140625f, 0});

  // A third of the scale is z = 1/2, and 63.5 goes to the even neighbour.
  CHECK(coded(Moment::first, {1, 3, -1}).codes == Codes{64, 127, -64});
  // Half a code, which is not to become zero, 1.5, 2.5 and 3.5 of a scale of 510.
  CHECK(coded(Moment::second, {1, 9, 25, 49, 260100}).codes == Codes{1, 2, 2, 4, 255});
  CHECK(coded(Moment::second, {0, 1e-20f, 260100}).codes == Codes{0, 1, 255});
}

TEST_CASE("scales that fp16 does not have end at what it has", "[kernels][adam8]") {
  const Coded large = coded(Moment::first, {1e6f, -1e30f, 65504});
  CHECK(large.scales == std::vector<double>{65504});
  CHECK(large.codes == std::vector<int>{127, -127, 127});
  CHECK(coded(Moment::second, {1e30f, 1}).codes == std::vector<int>{255, 1});
  // Rounding to nearest would be a scale of zero, and the half of all that is smaller than the scale.
  const Coded small = coded(Moment::first, {1e-9f, -2e-8f});
  CHECK(small.scales == std::vector<double>{std::ldexp(1, -24)});
  CHECK(std::abs(small.values[1] + 2e-8f) < 2e-10f);
  CHECK(coded(Moment::first, {2.3e-10f}).codes == std::vector<int>{0});
  CHECK(coded(Moment::first, {2.3e-10f}).scales == std::vector<double>{0});
}

TEST_CASE("a group with a number that is not finite is NaN as a whole, and no other", "[kernels][adam8]") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Moment moment : {Moment::first, Moment::second}) {
    for (const float bad : {kInfinity, std::nanf("")}) {
      std::vector<float> values(96, 1.0f);
      values[40] = bad;
      const Coded got = coded(moment, values);
      for (size_t i = 0; i < values.size(); ++i) {
        CHECK(std::isnan(got.values[i]) == (i / 32 == 1));
        if (i / 32 == 1) CHECK(got.codes[i] == 0);
      }
    }
  }
}

TEST_CASE("what was decoded has the codes that it had", "[kernels][adam8]") {
  for (const Moment moment : {Moment::first, Moment::second}) {
    for (int mantissa = 1024; mantissa < 2048; ++mantissa) {
      for (const int exponent : {-24, -10, 5}) {
        if (mantissa % 8 != 0 && exponent != -24) continue;
        const auto scale = static_cast<float>(std::ldexp(mantissa, exponent));
        std::vector<float> values;
        for (int code = 0; code < 256; ++code) {
          const double part = code / 255.0, x = scale * (moment == Moment::first ? 2 * part - 1 : part);
          values.push_back(static_cast<float>(moment == Moment::first ? x : x * x));
          if (values.size() % 32 == 0) values.back() = moment == Moment::first ? scale : scale * scale;
        }
        const Coded once = coded(moment, values), twice = coded(moment, once.values);
        REQUIRE(once.codes == twice.codes);
        REQUIRE(once.scales == twice.scales);
        REQUIRE(once.values == twice.values);
      }
    }
  }
}

TEST_CASE("a step in 8 bits is that of decoded moments, encoded again", "[kernels][adam8]") {
  for_every_coded([](auto storage) {
    for (const WeightDecay decay : kAllDecays) {
      for (const int64_t count : {0, 1, 31, 32, 33, 95, 1000, 2500}) {
        for (const Fill fill : {Fill::plain, Fill::mixed, Fill::wild}) {
          INFO(name_of(storage(), decay, false) << ", " << count << " elements");
          Samples samples(static_cast<uint64_t>(count + 7));
          CodedArrays by_loop(storage(), count, 3), by_element(storage(), count);
          by_loop.fill(samples, fill);
          by_element.copy_from(by_loop);
          for (int64_t step = 1; step <= 3; ++step) {
            step_on_cpu(by_loop, settings_with(decay), step, 480 * 2 + 64, /*first_element=*/13);
            step_by_elements<storage()>(by_element, settings_with(decay), step, 13);
            REQUIRE(differing_elements(by_loop, by_element) == 0);
            REQUIRE(by_loop.arrays.guards_are_intact());
          }
        }
      }
    }
  });
}

TEST_CASE("a step in 8 bits does not depend on tiles, and leaves tensors without a gradient alone",
          "[kernels][adam8]") {
  for_every_coded([](auto storage) {
    INFO(name_of(storage()));
    Samples samples(4);
    CodedArrays whole(storage(), 1511), cut(storage(), 1511), left(storage(), 1511);
    whole.fill(samples, Fill::mixed);
    cut.copy_from(whole), left.copy_from(whole);
    step_on_cpu(whole, settings_with(WeightDecay::decoupled), 5);
    step_on_cpu(cut, settings_with(WeightDecay::decoupled), 5, 32);
    CHECK(differing_elements(whole, cut) == 0);
    CHECK(differing_elements(whole, left) > 0);
    AdamGroupScalars skipping;
    skipping.set(0, storage(), settings_with(WeightDecay::none), 1, /*skip=*/true);
    cut.copy_from(left);
    const AdamTensor tensor = cut.tensor();
    const AdamGradient none{nullptr, 0}, some{cut.arrays.data(kGradient), 0};
    for (const AdamGradient& gradient : {none, some}) {
      kAdam8BitUpdate.cpu({storage(), false}, Tile{0, 1511, 0}, &tensor, &gradient, skipping.data());
    }
    CHECK(differing_elements(cut, left) == 0);
  });
}

}  // namespace pacer::kernels::testing
