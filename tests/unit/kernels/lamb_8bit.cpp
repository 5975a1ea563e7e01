// LAMB with moments in 8 bits: its two loops against decoded moments, the element functions and codes anew, and what they
// leave alone.
#include <cmath>
#include <cstring>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/kernels/lamb_8bit.h>

#include "support/catch.h"
#include "support/kernels/coded_arrays.h"
#include "support/kernels/lamb_kernels.h"
#include "support/kernels/reduction_reference.h"

namespace pacer::kernels::testing::lamb {
namespace {

LambOutcome coded_step(CodedArrays& coded, const RuleSettings& settings, int64_t step,
                       int64_t tile_elements = int64_t{1} << 30, int64_t first_element = 0) {
  LambGroupScalars scalars;
  scalars.set(0, coded.arrays.storage(), settings, step);
  return lamb_step_on_cpu(coded.arrays.storage(), coded.tensor(first_element), coded.arrays.data(kGradient),
                          coded.count(), scalars.data(), tile_elements, kLamb8BitLoops);
}

// The same one element after the other: moments of the rule in fp32, their codes, and the update that these codes say;
// sums in the order that is restated in reduction_reference.h.
template <AdamStorage kStorage>
LambOutcome lamb_step_by_elements(CodedArrays& coded, const RuleSettings& settings, int64_t step,
                                  int64_t first_element) {
  AdamArrays& arrays = coded.arrays;
  const auto scalars = lamb_scalars<float>(settings, step);
  std::vector<StoredElement<kStorage>> elements;
  std::vector<float> m = coded.moments(Moment::first), v = coded.moments(Moment::second);
  for (int64_t i = 0; i < coded.count(); ++i) {
    StoredElement<kStorage> e{};
    std::memcpy(&e.gradient, arrays.at(kGradient, i), sizeof e.gradient);
    std::memcpy(&e.parameter, arrays.at(kParameter, i), sizeof e.parameter);
    if constexpr (StorageOf<kStorage>::kHasExtra) std::memcpy(&e.extra, arrays.at(kExtra, i), sizeof e.extra);
    const auto at = static_cast<size_t>(i);
    const float g = scalars.factor * load(e.gradient);
    m[at] = std::fma(scalars.beta1, m[at], scalars.one_minus_beta1 * g);
    v[at] = std::fma(scalars.beta2, v[at], scalars.one_minus_beta2 * g * g);
    elements.push_back(e);
  }
  coded.set_moments(m, v);
  m = coded.moments(Moment::first), v = coded.moments(Moment::second);
  std::vector<LambTerms<float>> terms;
  for (size_t i = 0; i < elements.size(); ++i)
    terms.push_back(lamb_terms_of_codes(load_parameter(elements[i]), m[i], v[i], scalars));
  LambOutcome outcome;
  for (int64_t first = 0; first < coded.count(); first += 32768) {
    const int64_t size = std::min<int64_t>(32768, coded.count() - first);
    const auto sum_of = [&](float LambTerms<float>::*term) {
      return static_cast<double>(pacer::testing::sum_of_squares_of_unit<float>(
          size, [&](int64_t i) { return terms[static_cast<size_t>(first + i)].*term; }));
    };
    outcome.parameter_sums.push_back(sum_of(&LambTerms<float>::parameter));
    outcome.update_sums.push_back(sum_of(&LambTerms<float>::update));
  }
  const auto total = [](const std::vector<double>& sums) {
    return pacer::testing::sum_of_units(static_cast<int64_t>(sums.size()), sums.data());
  };
  outcome.ratio = lamb_ratio(total(outcome.parameter_sums), total(outcome.update_sums), scalars);
  for (int64_t i = 0; i < coded.count(); ++i) {
    StoredElement<kStorage>& e = elements[static_cast<size_t>(i)];
    const LambTerms<float>& of_element = terms[static_cast<size_t>(i)];
    const int64_t real = first_element + i;
    const PhiloxCounter draw = rounding_draw(settings.seed, step, real / 8);
    store_parameter(
        std::fma(-static_cast<float>(outcome.ratio.step_size), of_element.update, of_element.parameter),
        draw.word[real % 8 / 2] >> real % 2 * 16 & 0xFFFF, e);
    std::memcpy(arrays.at(kParameter, i), &e.parameter, sizeof e.parameter);
    if constexpr (StorageOf<kStorage>::kHasExtra) std::memcpy(arrays.at(kExtra, i), &e.extra, sizeof e.extra);
  }
  return outcome;
}

// NaNs are equal to each other.
bool same_numbers(const std::vector<double>& a, const std::vector<double>& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; i < a.size() && i < b.size(); ++i)
    same = same && (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])));
  return same;
}

}  // namespace

TEST_CASE("a LAMB step in 8 bits makes its update of the codes that it leaves", "[kernels][lamb][adam8]") {
  for_every_coded([](auto storage) {
    for (const int64_t count : {0, 1, 31, 32, 33, 95, 2049, 2500, 40001}) {
      for (const Fill fill : {Fill::plain, Fill::mixed, Fill::wild}) {
        if (count > 3000 && fill == Fill::wild) continue;
        INFO(name_of(storage()) << ", " << count << " elements, fill " << static_cast<int>(fill));
        Samples samples(static_cast<uint64_t>(count + 7));
        CodedArrays by_loop(storage(), count, 3), by_element(storage(), count);
        by_loop.fill(samples, fill);
        by_element.copy_from(by_loop);
        for (int64_t step = 1; step <= 3; ++step) {
          const LambOutcome found = coded_step(by_loop, lamb_settings_with(), step, 480 * 2 + 64, 13);
          const LambOutcome wanted =
              lamb_step_by_elements<storage()>(by_element, lamb_settings_with(), step, 13);
          REQUIRE(same_numbers(found.parameter_sums, wanted.parameter_sums));
          REQUIRE(same_numbers(found.update_sums, wanted.update_sums));
          REQUIRE(same_numbers({found.ratio.ratio}, {wanted.ratio.ratio}));
          REQUIRE(differing_elements(by_loop, by_element) == 0);
          REQUIRE(by_loop.arrays.guards_are_intact());
        }
      }
    }
  });
}

TEST_CASE("a LAMB step in 8 bits does not depend on tiles, and leaves tensors without a gradient alone",
          "[kernels][lamb][adam8]") {
  for_every_coded([](auto storage) {
    INFO(name_of(storage()));
    Samples samples(4);
    CodedArrays whole(storage(), 33511), cut(storage(), 33511), left(storage(), 33511);
    whole.fill(samples, Fill::mixed);
    cut.copy_from(whole), left.copy_from(whole);
    const LambOutcome one = coded_step(whole, lamb_settings_with(), 5);
    const LambOutcome many = coded_step(cut, lamb_settings_with(), 5, 32);
    CHECK(differing_elements(whole, cut) == 0);
    CHECK(same_numbers(one.update_sums, many.update_sums));
    CHECK(differing_elements(whole, left) > 0);
    cut.copy_from(left);
    for (const bool skip : {false, true}) {
      LambGroupScalars scalars;
      scalars.set(0, storage(), lamb_settings_with(), 1, skip);
      const LambOutcome outcome =
          lamb_step_on_cpu(storage(), cut.tensor(), skip ? cut.arrays.data(kGradient) : nullptr, cut.count(),
                           scalars.data(), 1024, kLamb8BitLoops);
      CHECK(differing_elements(cut, left) == 0);
      CHECK(outcome.update_sums == std::vector<double>{-1, -1});
      CHECK(outcome.ratio.ratio == -1);
    }
  });
}

// Its scale is below the smallest, and that of the first moment is not.
TEST_CASE("a second moment that is stored as zero moves nothing, whatever epsilon is",
          "[kernels][lamb][adam8]") {
  for (const double epsilon : {0.0, 1e-8}) {
    CodedArrays coded(AdamStorage::f32, 33);
    for (int64_t i = 0; i < 33; ++i) {
      coded.arrays.set(kParameter, i, 2);
      coded.arrays.set(kGradient, i, i < 32 ? 5e-9 : 0);
    }
    RuleSettings settings = lamb_settings_with(/*weight_decay=*/0);
    settings.epsilon = epsilon;
    const LambOutcome outcome = coded_step(coded, settings, 1);
    CHECK(coded.exp_avg_scale[0] != 0);
    CHECK(coded.exp_avg_sq_scale[0] == 0);
    CHECK(outcome.update_sums == std::vector<double>{0});
    CHECK(outcome.ratio.ratio == 1);
    for (int64_t i = 0; i < 33; ++i) CHECK(coded.arrays.get(kParameter, i) == 2);
  }
}

TEST_CASE("the loops of LAMB in 8 bits refuse fp64", "[kernels][lamb][adam8]") {
  AdamArrays arrays(AdamStorage::f64, 8);
  LambGroupScalars scalars;
  scalars.set(0, AdamStorage::f32, lamb_settings_with(), 1);
  const AdamTensor tensor = arrays.tensor();
  const AdamGradient gradient{arrays.data(kGradient), 0};
  const LambRatio ratio{1, 1};
  double sums[2];
  CHECK_THROWS_AS(lamb_8bit_moments_cpu(AdamStorage::f64, Tile{0, 8, 0}, &tensor, &gradient, scalars.data(),
                                        sums, sums + 1),
                  InvalidArgument);
  CHECK_THROWS_AS(
      lamb_8bit_update_cpu(AdamStorage::f64, Tile{0, 8, 0}, &tensor, &gradient, scalars.data(), &ratio),
      InvalidArgument);
}

}  // namespace pacer::kernels::testing::lamb
