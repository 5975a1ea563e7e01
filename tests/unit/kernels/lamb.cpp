// The LAMB kernels on the CPU: which elements they touch, in which order they add, and how each dtype set
// stores what the rule says. How exact the rule is computed is the business of
// tests/property/lamb_error_bound.cpp.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <pacer/kernels/lamb.h>

#include "support/catch.h"
#include "support/kernels/half_reference.h"
#include "support/kernels/lamb_kernels.h"
#include "support/kernels/reduction_reference.h"

namespace pacer::kernels::testing::lamb {
namespace {

using pacer::testing::decode_half;
using pacer::testing::kBFloat16Format;
using pacer::testing::nearest_half;
using pacer::testing::same_number;
using pacer::testing::Ties;

constexpr int64_t kOddCounts[] = {0,   1,    2,    3,    5,    31,    33,    127,   128,   129,  511,
                                  513, 2047, 2048, 2049, 4095, 30721, 32767, 32768, 32769, 70001};

AdamArrays filled(AdamStorage storage, int64_t count, Fill fill, uint64_t seed, int shift = 0) {
  Samples samples(seed);
  AdamArrays arrays(storage, count, shift);
  arrays.fill(samples, fill);
  return arrays;
}

AdamArrays copy_of(const AdamArrays& arrays, int shift = 0) {
  AdamArrays copy(arrays.storage(), arrays.count(), shift);
  copy.copy_from(arrays);
  return copy;
}

// Element i in the types of its dtype set.
template <AdamStorage kStorage>
StoredElement<kStorage> element_of(AdamArrays& arrays, int64_t i) {
  StoredElement<kStorage> e{};
  std::memcpy(&e.gradient, arrays.at(kGradient, i), sizeof e.gradient);
  std::memcpy(&e.parameter, arrays.at(kParameter, i), sizeof e.parameter);
  std::memcpy(&e.exp_avg, arrays.at(kExpAvg, i), sizeof e.exp_avg);
  std::memcpy(&e.exp_avg_sq, arrays.at(kExpAvgSq, i), sizeof e.exp_avg_sq);
  if constexpr (StorageOf<kStorage>::kHasExtra) std::memcpy(&e.extra, arrays.at(kExtra, i), sizeof e.extra);
  return e;
}

// Sums and parameters by the element functions, one element after the other, with the sums in the order that
// is restated in reduction_reference.h.
template <AdamStorage kStorage>
void compare_with_element_functions(int64_t count, Fill fill) {
  using Real = typename StorageOf<kStorage>::Real;
  const RuleSettings settings = lamb_settings_with();
  AdamArrays before = filled(kStorage, count, fill, 3), after = copy_of(before);
  const LambOutcome outcome = lamb_step_on_cpu(after, settings, 4, 999, 5);
  const auto scalars = lamb_scalars<Real>(settings, 4);
  std::vector<LambTerms<Real>> terms;
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    StoredElement<kStorage> e = element_of<kStorage>(before, i);
    terms.push_back(lamb_moments(e, scalars));
    const PhiloxCounter draw = rounding_draw(settings.seed, 4, (i + 5) / 8);
    lamb_step(e, scalars, static_cast<Real>(outcome.ratio.step_size),
              draw.word[(i + 5) % 8 / 2] >> (i + 5) % 2 * 16 & 0xFFFF);
    StoredElement<kStorage> found = element_of<kStorage>(after, i);
    wrong += std::memcmp(&e.parameter, &found.parameter, sizeof e.parameter) != 0;
    wrong += std::memcmp(&e.exp_avg, &found.exp_avg, sizeof e.exp_avg) != 0;
    wrong += std::memcmp(&e.exp_avg_sq, &found.exp_avg_sq, sizeof e.exp_avg_sq) != 0;
    if constexpr (StorageOf<kStorage>::kHasExtra) {
      wrong += std::memcmp(&e.extra, &found.extra, sizeof e.extra) != 0;
    }
  }
  CHECK(wrong == 0);
  for (size_t unit = 0; unit < outcome.parameter_sums.size(); ++unit) {
    const int64_t first = static_cast<int64_t>(unit) * 32768, size = std::min<int64_t>(32768, count - first);
    const auto sum_of = [&](Real LambTerms<Real>::*term) {
      return static_cast<double>(pacer::testing::sum_of_squares_of_unit<Real>(
          size, [&](int64_t i) { return terms[static_cast<size_t>(first + i)].*term; }));
    };
    CHECK(outcome.parameter_sums[unit] == sum_of(&LambTerms<Real>::parameter));
    CHECK(outcome.update_sums[unit] == sum_of(&LambTerms<Real>::update));
  }
}

LambRatio ratio_of(double parameter_squares, double update_squares, const RuleSettings& settings) {
  return lamb_ratio(parameter_squares, update_squares, lamb_scalars<double>(settings, 1));
}

}  // namespace

TEST_CASE("the loops do what the element functions say and add in the specified order", "[kernels][lamb]") {
  for (const AdamStorage storage : kAllStorages) {
    for (const int64_t count : {1, 3, 100, 2049, 5000, 70001}) {
      INFO(name_of(storage) << ", " << count);
      with_storage(storage, [&](auto chosen) {
        compare_with_element_functions<chosen()>(count, Fill::plain);
        compare_with_element_functions<chosen()>(count, Fill::mixed);  // the sums may overflow
      });
    }
  }
}

TEST_CASE("a LAMB step depends neither on tiles nor on alignment and touches nothing beside its elements",
          "[kernels][lamb]") {
  for (const AdamStorage storage : kAllStorages) {
    for (const int64_t count : kOddCounts) {
      INFO(name_of(storage) << ", " << count);
      const AdamArrays before = filled(storage, count, Fill::mixed, 1);
      AdamArrays expected = copy_of(before);
      const LambOutcome outcome = lamb_step_on_cpu(expected, lamb_settings_with(), 3);
      REQUIRE((count == 0 || !expected.same_bytes(before)));
      for (const int shift : {1, 3}) {
        AdamArrays after = copy_of(before, shift);
        const LambOutcome again = lamb_step_on_cpu(after, lamb_settings_with(), 3, shift == 1 ? 100 : 2048);
        REQUIRE(differing_elements(after, expected) == 0);
        REQUIRE(after.guards_are_intact());
        REQUIRE(again.parameter_sums == outcome.parameter_sums);
        REQUIRE(again.update_sums == outcome.update_sums);
        REQUIRE(std::memcmp(&again.ratio, &outcome.ratio, sizeof(LambRatio)) == 0);
      }
      AdamArrays unused = copy_of(expected);
      std::memcpy(unused.data(kGradient), before.data(kGradient), before.size(kGradient));
      std::memcpy(unused.data(kMaxExpAvgSq), before.data(kMaxExpAvgSq), before.size(kMaxExpAvgSq));
      REQUIRE(unused.same_bytes(expected));
    }
  }
}

TEST_CASE("without a gradient, or told to skip, nothing is written, sums and ratio included",
          "[kernels][lamb]") {
  for (const AdamStorage storage : kAllStorages) {
    const AdamArrays before = filled(storage, 3000, Fill::plain, 2);
    for (const bool skip : {false, true}) {
      AdamArrays after = copy_of(before);
      LambGroupScalars scalars;
      scalars.set(0, storage, lamb_settings_with(), 1, skip);
      const LambOutcome outcome = lamb_step_on_cpu(
          storage, after.tensor(), skip ? after.data(kGradient) : nullptr, after.count(), scalars.data());
      CHECK(after.same_bytes(before));
      CHECK(outcome.parameter_sums == std::vector<double>{-1});
      CHECK(outcome.update_sums == std::vector<double>{-1});
      CHECK(outcome.ratio.ratio == -1);
    }
  }
}

TEST_CASE("dtype sets with fp32 moments are the fp32 step of their values", "[kernels][lamb][storage]") {
  for (const AdamStorage storage : {AdamStorage::bf16_master, AdamStorage::f16_master,
                                    AdamStorage::bf16_remainder, AdamStorage::bf16_stochastic}) {
    INFO(name_of(storage));
    constexpr int64_t kCount = 5000;
    AdamArrays arrays = filled(storage, kCount, Fill::plain, 4), single(AdamStorage::f32, kCount);
    const auto exact_parameter = [&](int64_t i) -> double {
      if (storage == AdamStorage::bf16_stochastic) return arrays.get(kParameter, i);
      if (storage != AdamStorage::bf16_remainder) return arrays.get(kExtra, i);
      uint16_t high, low;
      std::memcpy(&high, arrays.at(kParameter, i), 2);
      std::memcpy(&low, arrays.at(kExtra, i), 2);
      return float_of((uint32_t{high} << 16) + low - (low < 0x8000 ? 0u : 0x10000u));
    };
    for (int64_t i = 0; i < kCount; ++i) {
      for (const int array : {kGradient, kExpAvg, kExpAvgSq}) single.set(array, i, arrays.get(array, i));
      single.set(kParameter, i, exact_parameter(i));
    }
    const LambOutcome wanted = lamb_step_on_cpu(single, lamb_settings_with(), 3);
    const LambOutcome found = lamb_step_on_cpu(arrays, lamb_settings_with(), 3);
    CHECK(wanted.ratio.ratio == found.ratio.ratio);
    CHECK(wanted.update_sums == found.update_sums);
    int64_t wrong_moments = 0, wrong_parameters = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      for (const int array : {kExpAvg, kExpAvgSq})
        wrong_moments += arrays.get(array, i) != single.get(array, i);
      const double p = single.get(kParameter, i);
      if (storage == AdamStorage::bf16_stochastic) {
        const double spacing = pacer::testing::half_spacing(p, kBFloat16Format);
        wrong_parameters += !(std::abs(arrays.get(kParameter, i) - p) < spacing);
      } else {
        wrong_parameters += !same_number(exact_parameter(i), p);
      }
    }
    CHECK(wrong_moments == 0);
    CHECK(wrong_parameters == 0);
  }
}

TEST_CASE("with bf16 moments, ratio and update are those of the moments as they are stored",
          "[kernels][lamb][storage]") {
  constexpr int64_t kCount = 3000;
  const RuleSettings settings = lamb_settings_with();
  const AdamArrays before = filled(AdamStorage::bf16, kCount, Fill::plain, 5);
  AdamArrays after = copy_of(before);
  const LambOutcome outcome = lamb_step_on_cpu(after, settings, 2);
  const double c1 = 1 - settings.beta1 * settings.beta1, c2 = 1 - settings.beta2 * settings.beta2;
  long double parameters = 0, updates = 0;
  std::vector<double> update(kCount);
  int64_t wrong = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const double p = before.get(kParameter, i), g = settings.factor * before.get(kGradient, i);
    const double m = settings.beta1 * before.get(kExpAvg, i) + (1 - settings.beta1) * g;
    // Near a tie, the fp32 number that is rounded may lie on its other side.
    wrong += std::abs(after.get(kExpAvg, i) - m) > 0.501 * pacer::testing::half_spacing(m, kBFloat16Format);
    update[static_cast<size_t>(i)] =
        after.get(kExpAvg, i) / c1 / (std::sqrt(after.get(kExpAvgSq, i) / c2) + settings.epsilon) +
        settings.weight_decay * p;
    parameters += p * p;
    updates += update[static_cast<size_t>(i)] * update[static_cast<size_t>(i)];
  }
  CHECK(wrong == 0);
  const double ratio = static_cast<double>(std::sqrt(parameters / updates));
  CHECK(outcome.ratio.ratio == Catch::Approx(ratio).epsilon(3e-7));
  for (int64_t i = 0; i < kCount; ++i) {
    const double p =
        before.get(kParameter, i) - settings.learning_rate * ratio * update[static_cast<size_t>(i)];
    wrong +=
        std::abs(after.get(kParameter, i) - p) > 0.501 * pacer::testing::half_spacing(p, kBFloat16Format);
  }
  CHECK(wrong == 0);
}

TEST_CASE("the trust ratio is the quotient of the norms, clamped, and 1 where one is zero",
          "[kernels][lamb]") {
  const RuleSettings plain = lamb_settings_with();  // 0.01 to 10
  CHECK(ratio_of(9, 4, plain).ratio == 1.5);
  CHECK(ratio_of(9, 4, plain).step_size == 0.02 * 1.5);
  CHECK(ratio_of(4, 9, plain).ratio == 2.0 / 3.0);
  CHECK(ratio_of(1e-6, 1, plain).ratio == 0.01);
  CHECK(ratio_of(1, 1e-6, plain).ratio == 10);
  for (const auto& [p, u] : {std::pair{0.0, 4.0}, {4.0, 0.0}, {0.0, 0.0}, {0.0, HUGE_VAL}}) {
    CHECK(ratio_of(p, u, plain).ratio == 1);
  }
  RuleSettings off = plain, narrow = plain;
  off.adapt = 0;
  narrow.min_coeff = 2;
  narrow.max_coeff = 3;
  CHECK(ratio_of(0, 4, narrow).ratio == 1);  // not clamped
  CHECK(ratio_of(4, 4, narrow).ratio == 2);
  for (const double sum : {0.0, 9.0, HUGE_VAL, std::nan("")}) {
    CHECK(ratio_of(sum, 4, off).ratio == 1);
    CHECK(ratio_of(4, sum, off).step_size == 0.02);
  }
  CHECK(ratio_of(HUGE_VAL, 1, plain).ratio == 10);
  CHECK(ratio_of(1, HUGE_VAL, plain).ratio == 0.01);
  CHECK(std::isnan(ratio_of(std::nan(""), 1, plain).ratio));
  CHECK(std::isnan(ratio_of(1, std::nan(""), plain).ratio));
  // Rounded once, to the type of the dtype set.
  RuleSettings third = plain;
  third.learning_rate = 1.0 / 3;
  CHECK(lamb_ratio(9, 4, lamb_scalars<float>(third, 1)).step_size == static_cast<float>(0.5));
  CHECK(lamb_ratio(1, 1, lamb_scalars<float>(third, 1)).step_size == static_cast<float>(1.0 / 3));
}

TEST_CASE("the sums of units are added in order, whatever their number", "[kernels][lamb]") {
  Samples samples(6);
  LambGroupScalars scalars;
  RuleSettings settings = lamb_settings_with();
  settings.max_coeff = 1e300;
  settings.min_coeff = 0;
  scalars.set(0, AdamStorage::f64, settings, 1);
  const AdamGradient gradient{&settings, 0};
  for (const int64_t count : {0, 1, 2, 255, 256, 257, 5000}) {
    std::vector<double> sums[2];
    for (auto& list : sums) {
      for (int64_t i = 0; i < count + 2; ++i) list.push_back(samples.log_uniform(1e-3, 1e9));
    }
    LambRatio ratio{};
    lamb_ratio_cpu(AdamStorage::f64, {2, count}, gradient, scalars.data(), {sums[0].data(), sums[1].data()},
                   &ratio);
    const double p = pacer::testing::sum_of_units(count, sums[0].data() + 2);
    const double u = pacer::testing::sum_of_units(count, sums[1].data() + 2);
    CHECK(ratio.ratio == (count == 0 ? 1 : std::sqrt(p) / std::sqrt(u)));
  }
}

#if defined(__SSE2__)
TEST_CASE("LAMB computes denormals in full whatever the caller's mode", "[kernels][lamb]") {
  for (const AdamStorage storage : {AdamStorage::f32, AdamStorage::f64, AdamStorage::bf16_remainder}) {
    AdamArrays arrays(storage, 500);
    Samples samples(7);
    const double wide = storage == AdamStorage::f64 ? 1e-270 : 1;
    for (int64_t i = 0; i < arrays.count(); ++i) {
      for (int array = kGradient; array <= kExpAvgSq; ++array) {
        arrays.set(array, i, samples.log_uniform(1e-44, 1e-36) * wide);
      }
      arrays.set_master(i, static_cast<float>(samples.log_uniform(1e-44, 1e-36)));
    }
    AdamArrays expected = copy_of(arrays);
    lamb_step_on_cpu(expected, lamb_settings_with(), 1);
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    lamb_step_on_cpu(arrays, lamb_settings_with(), 1);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(mode);
    CHECK((after & 0x8040) == 0x8040);
    CHECK(arrays.same_bytes(expected));
  }
}
#endif

}  // namespace pacer::kernels::testing::lamb
