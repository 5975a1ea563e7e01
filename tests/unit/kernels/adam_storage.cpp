// The dtype sets: each 16-bit set is the fp32 update of its values, stored in its own format. Formats are
// restated in support/kernels/half_reference.h; the fp32 update itself is tested elsewhere.
#include <cmath>
#include <cstdint>
#include <cstring>

#include <pacer/core/philox.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/math/adam_storage.h>

#include "support/catch.h"
#include "support/kernels/adam_arrays.h"
#include "support/kernels/correction_reference.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::corrected;
using pacer::testing::correction_of;
using pacer::testing::decode_half;
using pacer::testing::HalfFormat;
using pacer::testing::kBFloat16Format;
using pacer::testing::kFloat16Format;
using pacer::testing::nearest_half;
using pacer::testing::same_number;
using pacer::testing::Ties;

uint16_t bits_at(const AdamArrays& arrays, int array, int64_t i) {
  uint16_t bits;
  std::memcpy(&bits, arrays.data(array) + 2 * i, 2);
  return bits;
}

// What element i holds, as the double of the same value.
double held(const AdamArrays& arrays, int array, int64_t i) {
  switch (type_of(arrays.storage(), array)) {
    case ElementType::bf16:
      return decode_half(bits_at(arrays, array, i), kBFloat16Format);
    case ElementType::f16:
      return decode_half(bits_at(arrays, array, i), kFloat16Format);
    default:
      return arrays.get(array, i);
  }
}

// The parameter that the update works on: the master copy where there is one.
double held_parameter(const AdamArrays& arrays, int64_t i) {
  switch (arrays.storage()) {
    case AdamStorage::bf16_master:
    case AdamStorage::f16_master:
      return held(arrays, kExtra, i);
    case AdamStorage::bf16_remainder: {
      // In units of 2^-16 of the bf16's spacing; the bf16 was rounded, so the remainder has a sign.
      const uint32_t high = uint32_t{bits_at(arrays, kParameter, i)} << 16;
      const int low = bits_at(arrays, kExtra, i);
      return float_of(low < 0x8000 ? high + static_cast<uint32_t>(low)
                                   : high - static_cast<uint32_t>(0x10000 - low));
    }
    case AdamStorage::bf16_correction: {
      const auto correction = static_cast<int>(arrays.get(kExtra, i));
      return static_cast<float>(corrected(bits_at(arrays, kParameter, i), correction));
    }
    default:
      return held(arrays, kParameter, i);
  }
}

// What the fp32 value p is kept as: itself, but for a correction, which has 8 bits.
double kept_parameter(AdamStorage storage, double p) {
  if (storage != AdamStorage::bf16_correction || !std::isfinite(p) || p == 0) return p;
  const uint16_t rounded = to_bfloat16(static_cast<float>(p)).bits;
  return static_cast<float>(corrected(rounded, correction_of(p, rounded)));
}

// The same values in fp32 arrays, stepped.
AdamArrays stepped_in_fp32(const AdamArrays& arrays, bool amsgrad, const RuleSettings& settings,
                           int64_t step) {
  AdamArrays single(AdamStorage::f32, arrays.count());
  for (int64_t i = 0; i < arrays.count(); ++i) {
    for (int array = kGradient; array <= kMaxExpAvgSq; ++array) single.set(array, i, held(arrays, array, i));
    single.set(kParameter, i, held_parameter(arrays, i));
  }
  step_on_cpu(single, amsgrad, settings, step);
  return single;
}

AdamArrays mixed_values(AdamStorage storage, int64_t count, uint64_t seed) {
  Samples samples(seed);
  AdamArrays arrays(storage, count);
  arrays.fill(samples, Fill::mixed);
  return arrays;
}

// The 16 random bits of an element: word 0's low half, its
// high half, word 1's low half, ... of draw index / 8.
uint32_t random_bits_of(uint64_t seed, int64_t step, int64_t real_index) {
  const uint64_t draw = static_cast<uint64_t>(real_index) >> 3;
  const PhiloxCounter words =
      philox4x32_10({{static_cast<uint32_t>(seed & 0xFFFFFFFFu), static_cast<uint32_t>(seed >> 32)}},
                    {{static_cast<uint32_t>(draw & 0xFFFFFFFFu), static_cast<uint32_t>(draw >> 32),
                      static_cast<uint32_t>(step), uint32_t{1} << 24}});
  const int shift = real_index & 1 ? 16 : 0;
  return words.word[(real_index >> 1) & 3] >> shift & 0xFFFF;
}

// The neighbour of `value` in bf16 that these random bits choose: away
// from zero if they reach over the part of the spacing that is missing.
double stochastic_reference(double value, uint32_t random16) {
  const double spacing = pacer::testing::half_spacing(value, kBFloat16Format);
  const double below = std::trunc(value / spacing) * spacing;
  const double part = std::abs(value - below) / spacing;
  const double chosen = part + random16 / 65536.0 >= 1 ? below + std::copysign(spacing, value) : below;
  return std::copysign(chosen, value);
}

// The element function itself, compiled here and so without the instructions that the loops are cloned for.
template <AdamStorage kStorage, bool kAmsgrad>
void step_by_element_function(AdamArrays& arrays, const RuleSettings& settings, int64_t step) {
  const auto scalars = adam_scalars<typename StorageOf<kStorage>::Real>(settings, step);
  for (int64_t i = 0; i < arrays.count(); ++i) {
    StoredElement<kStorage> e{};
    const auto for_each_member = [&](const auto& copy) {
      copy(e.gradient, kGradient);
      copy(e.parameter, kParameter);
      copy(e.exp_avg, kExpAvg);
      copy(e.exp_avg_sq, kExpAvgSq);
      copy(e.max_exp_avg_sq, kMaxExpAvgSq);
      if constexpr (StorageOf<kStorage>::kHasExtra) copy(e.extra, kExtra);
    };
    for_each_member(
        [&](auto& member, int array) { std::memcpy(&member, arrays.at(array, i), sizeof member); });
    const PhiloxCounter draw = rounding_draw(settings.seed, step, i / 8);
    step_stored<AdamRule<kAmsgrad>, kStorage>(e, scalars, draw.word[i % 8 / 2] >> i % 2 * 16 & 0xFFFF);
    for_each_member(
        [&](auto& member, int array) { std::memcpy(arrays.at(array, i), &member, sizeof member); });
  }
}

template <AdamStorage kStorage>
void compare_with_element_function() {
  for (const WeightDecay decay : kAllDecays) {
    for (const bool amsgrad : {false, true}) {
      INFO(name_of(kStorage, decay, amsgrad));
      Samples samples(10);
      AdamArrays by_loop(kStorage, 2000), by_element(kStorage, 2000);
      by_loop.fill(samples, Fill::mixed);
      by_element.copy_from(by_loop);
      step_on_cpu(by_loop, amsgrad, settings_with(decay), 4);
      (amsgrad ? step_by_element_function<kStorage, true>
               : step_by_element_function<kStorage, false>)(by_element, settings_with(decay), 4);
      CHECK(differing_elements(by_loop, by_element) == 0);
    }
  }
}

}  // namespace

TEST_CASE("every 16-bit dtype set is the fp32 update of its values", "[kernels][adam][storage]") {
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    if (storage == AdamStorage::f64 || storage == AdamStorage::f32) return;
    INFO(name_of(storage, decay, amsgrad));
    constexpr int64_t kCount = 2000, kStep = 3;
    const RuleSettings settings = settings_with(decay);
    AdamArrays arrays = mixed_values(storage, kCount, 1);
    const AdamArrays expected = stepped_in_fp32(arrays, amsgrad, settings, kStep);
    step_on_cpu(arrays, amsgrad, settings, kStep);
    int wrong_parameters = 0, wrong_masters = 0, wrong_moments = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      const double p = expected.get(kParameter, i);
      const HalfFormat format = storage == AdamStorage::f16_master ? kFloat16Format : kBFloat16Format;
      double stored =
          nearest_half(p, format, storage == AdamStorage::bf16_remainder ? Ties::away : Ties::to_even);
      if (storage == AdamStorage::bf16_stochastic) {
        stored = stochastic_reference(p, random_bits_of(settings.seed, kStep, i));
      }
      wrong_parameters += !same_number(held(arrays, kParameter, i), stored);
      if (type_of(storage, kExtra) != ElementType::none)
        wrong_masters += !same_number(held_parameter(arrays, i), kept_parameter(storage, p));
      for (const int array : {kExpAvg, kExpAvgSq, kMaxExpAvgSq}) {
        double moment = expected.get(array, i);
        if (storage == AdamStorage::bf16) moment = nearest_half(moment, kBFloat16Format, Ties::to_even);
        wrong_moments += !same_number(held(arrays, array, i), moment);
      }
    }
    CHECK(wrong_parameters == 0);
    CHECK(wrong_masters == 0);
    CHECK(wrong_moments == 0);
  });
}

TEST_CASE("a step does not depend on the processor's instructions", "[kernels][adam][storage]") {
  compare_with_element_function<AdamStorage::f64>();
  compare_with_element_function<AdamStorage::f32>();
  compare_with_element_function<AdamStorage::bf16_master>();
  compare_with_element_function<AdamStorage::f16_master>();
  compare_with_element_function<AdamStorage::bf16_remainder>();
  compare_with_element_function<AdamStorage::bf16_correction>();
  compare_with_element_function<AdamStorage::bf16>();
  compare_with_element_function<AdamStorage::bf16_stochastic>();
}

TEST_CASE("a master copy counts where it rounds to the parameter, and the parameter where it does not",
          "[kernels][adam][storage]") {
  for (const AdamStorage storage : {AdamStorage::bf16_master, AdamStorage::f16_master}) {
    AdamArrays kept = mixed_values(storage, 100, 2), written(storage, 100), expected(storage, 100);
    for (int64_t i = 0; i < 100; ++i) kept.set(kParameter, i, kept.get(kExtra, i));
    written.copy_from(kept);
    expected.copy_from(kept);
    for (int64_t i = 0; i < 100; i += 3) {
      const double before = kept.get(kParameter, i);
      if (!std::isfinite(before)) continue;
      const double value = i % 2 == 0 && std::abs(before) > 1e-3 ? 0.0 : 2 * before + 1;
      written.set(kParameter, i, value);
      expected.set(kParameter, i, value);
      expected.set(kExtra, i, expected.get(kParameter, i));
    }
    step_on_cpu(written, false, settings_with(WeightDecay::l2), 1);
    step_on_cpu(expected, false, settings_with(WeightDecay::l2), 1);
    CHECK(differing_elements(written, expected) == 0);
    step_on_cpu(kept, false, settings_with(WeightDecay::l2), 1);
    CHECK(differing_elements(written, kept) > 0);
  }
}

TEST_CASE("a zero beside a negative remainder was written by somebody else, and is zero",
          "[kernels][adam][storage]") {
  for (const uint32_t low : {0x8000u, 0xFFFFu, 0x9123u}) {
    CHECK(join({0x0000}, static_cast<uint16_t>(low)) == 0.0f);
    CHECK(bits_of(join({0x8000}, static_cast<uint16_t>(low))) == 0x80000000u);
  }
  CHECK(bits_of(join({0x0000}, 0x7FFF)) == 0x7FFFu);  // split makes these
  for (const float value : {0x1p-149f, -0x1p-149f, 0x1.fffffep-127f, 0.0f, -0.0f, 1.5f}) {
    const BFloat16AndRemainder both = split(value);
    CHECK(bits_of(join(both.rounded, both.remainder)) == bits_of(value));
  }
}

TEST_CASE("updates too small for bf16 add up in the master value", "[kernels][adam][storage]") {
  for (const AdamStorage storage :
       {AdamStorage::bf16_master, AdamStorage::bf16_remainder, AdamStorage::bf16_correction}) {
    AdamArrays arrays(storage, 1);
    RuleSettings settings;
    settings.learning_rate = 0x1p-13;  // the spacing of bf16 above 1 is 2^-7
    for (const int array : {kExpAvg, kExpAvgSq, kMaxExpAvgSq}) arrays.set(array, 0, 0.0);
    arrays.set(kGradient, 0, -1.0);
    arrays.set_master(0, 1.0f);
    for (int64_t t = 1; t <= 64; ++t) step_on_cpu(arrays, false, settings, t);
    CHECK(held(arrays, kParameter, 0) == 1 + 0x1p-7);
    // A step of 3.97 127ths of half a spacing is rounded to 4 of them.
    const bool is_rounded = storage == AdamStorage::bf16_correction;
    CHECK(held_parameter(arrays, 0) == Catch::Approx(1 + 0x1p-7).epsilon(is_rounded ? 1e-4 : 1e-5));
  }
}

TEST_CASE("a NaN parameter with a remainder is stored as 0x7FC0 and 0", "[kernels][adam][storage]") {
  for (const AdamStorage storage : {AdamStorage::bf16_remainder, AdamStorage::bf16_correction}) {
    AdamArrays arrays = mixed_values(storage, 20, 3);
    arrays.set(kGradient, 7, std::nan(""));
    arrays.set(kGradient, 8, HUGE_VAL);
    step_on_cpu(arrays, false, settings_with(WeightDecay::decoupled), 1);
    for (const int64_t i : {7, 8}) {
      CHECK(bits_at(arrays, kParameter, i) == 0x7FC0);
      CHECK(arrays.get(kExtra, i) == 0);
    }
    CHECK(bits_at(arrays, kParameter, 9) != 0x7FC0);
  }
}

TEST_CASE("the random bits of an element depend on its place in the model only", "[kernels][adam][storage]") {
  RuleSettings settings = settings_with(WeightDecay::none);
  int64_t wrong = 0, up = 0, elements = 0;
  for (const int64_t first_element :
       {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{8}, int64_t{1019}, (int64_t{1} << 32) - 3,
        (int64_t{1} << 35) - 3, (int64_t{1} << 40) + 6}) {
    for (const int64_t count : {1, 2, 7, 8, 9, 511, 512, 513, 1500}) {
      for (const int64_t step : {int64_t{1}, int64_t{2}, (int64_t{1} << 32) + 1}) {
        AdamArrays arrays = mixed_values(AdamStorage::bf16_stochastic, count, 4);
        const AdamArrays expected = stepped_in_fp32(arrays, false, settings, step);
        step_on_cpu(arrays, false, settings, step, 300, first_element);
        for (int64_t i = 0; i < count; ++i) {
          const double p = expected.get(kParameter, i);
          const double rounded =
              stochastic_reference(p, random_bits_of(settings.seed, step, first_element + i));
          wrong += !same_number(held(arrays, kParameter, i), rounded);
          up += std::abs(rounded) > std::abs(p);
          ++elements;
        }
      }
    }
  }
  CHECK(wrong == 0);
  CHECK(up > elements / 3);  // both directions occur
  CHECK(up < elements - elements / 3);
}

TEST_CASE("stochastic rounding moves the mean by the whole update", "[kernels][adam][storage]") {
  // 3/8 of the spacing of bf16 above 1: nearest rounding would lose the update in every element.
  constexpr int64_t kCount = 1 << 16;
  RuleSettings settings;
  settings.learning_rate = 0x3p-10;
  settings.epsilon = 0;
  settings.seed = 2024;
  AdamArrays arrays(AdamStorage::bf16_stochastic, kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    arrays.set(kParameter, i, 1.0);
    arrays.set(kGradient, i, -0.5);
    for (const int array : {kExpAvg, kExpAvgSq, kMaxExpAvgSq}) arrays.set(array, i, 0.0);
  }
  step_on_cpu(arrays, false, settings, 1, 1000, 3);
  double moved_up = 0;
  for (int64_t i = 0; i < kCount; ++i) moved_up += held(arrays, kParameter, i) > 1;
  const double expected = 0.375, sigma = std::sqrt(expected * (1 - expected) / kCount);
  CHECK(std::abs(moved_up / kCount - expected) < 4 * sigma);
}

}  // namespace pacer::kernels::testing
