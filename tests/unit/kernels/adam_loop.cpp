// The CPU loop of the Adam kernels: which elements it touches, in every dtype set and mode. What it computes
// is the business of kernels/adam_rule.cpp, kernels/adam_storage.cpp and tests/property/adam_error_bound.cpp.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <pacer/core/tile.h>
#include <pacer/kernels/adam.h>

#include "support/catch.h"
#include "support/kernels/adam_arrays.h"

namespace pacer::kernels::testing {
namespace {

constexpr int64_t kOddCounts[] = {0,   1,   2,    3,    5,    7,    8,    9,    15,   16,   17,   31,
                                  32,  33,  63,   64,   65,   127,  129,  255,  256,  257,  511,  512,
                                  513, 777, 1000, 1023, 1025, 2047, 2048, 2049, 3001, 4095, 4096, 4097};

// One step, element by element: the simplest loop there is.
AdamArrays stepped_one_by_one(const AdamArrays& before, bool amsgrad, const RuleSettings& settings,
                              int64_t step, int64_t first_element = 0) {
  AdamArrays after(before.storage(), before.count());
  after.copy_from(before);
  step_on_cpu(after, amsgrad, settings, step, 1, first_element);
  return after;
}

#if defined(__SSE2__)
// Flush-to-zero and denormals-are-zero until destroyed, as programs set them to run faster.
class FlushedDenormals {
 public:
  FlushedDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(kMode); }
  ~FlushedDenormals() { _mm_setcsr(saved_); }
  static bool is_untouched() { return (_mm_getcsr() & ~kRaisedFlags) == kMode; }

 private:
  static constexpr unsigned kMode = 0x8040 | 0x1F80, kRaisedFlags = 0x3F;
  unsigned saved_;
};
#endif

}  // namespace

TEST_CASE("a step does not depend on how a tensor is cut into tiles", "[kernels][adam]") {
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    INFO(name_of(storage, decay, amsgrad));
    Samples samples(1);
    AdamArrays before(storage, 1061);
    before.fill(samples, Fill::mixed);
    const AdamArrays expected = stepped_one_by_one(before, amsgrad, settings_with(decay), 5);
    REQUIRE_FALSE(expected.same_bytes(before));
    for (const int64_t tile_elements : {2, 7, 64, 500, 512, 1060, 1061, 5000}) {
      AdamArrays after(storage, before.count());
      after.copy_from(before);
      step_on_cpu(after, amsgrad, settings_with(decay), 5, tile_elements);
      INFO("tiles of " << tile_elements);
      CHECK(differing_elements(after, expected) == 0);
    }
  });
}

TEST_CASE("a step does not depend on the alignment of the memory", "[kernels][adam]") {
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    INFO(name_of(storage, decay, amsgrad));
    Samples samples(2);
    AdamArrays before(storage, 333);
    before.fill(samples, Fill::mixed);
    const AdamArrays expected = stepped_one_by_one(before, amsgrad, settings_with(decay), 2);
    for (int shift = 1; shift <= 9; ++shift) {
      AdamArrays after(storage, before.count(), shift);
      after.copy_from(before);
      step_on_cpu(after, amsgrad, settings_with(decay), 2);
      CHECK(differing_elements(after, expected) == 0);
      CHECK(after.guards_are_intact());
    }
  });
}

TEST_CASE("a step touches every element of a tensor of any size and none beside it", "[kernels][adam]") {
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    Samples samples(3);
    for (const int64_t count : kOddCounts) {
      INFO(name_of(storage, decay, amsgrad));
      INFO(count << " elements");
      AdamArrays before(storage, count);
      before.fill(samples, Fill::plain);
      const AdamArrays expected = stepped_one_by_one(before, amsgrad, settings_with(decay), 1, 13);
      AdamArrays after(storage, count, static_cast<int>(count % 4));
      after.copy_from(before);
      step_on_cpu(after, amsgrad, settings_with(decay), 1, int64_t{1} << 30, 13);
      REQUIRE(differing_elements(after, expected) == 0);
      REQUIRE(after.guards_are_intact());
    }
  });
}

TEST_CASE("the gradient is never written, and nothing that the mode does not have", "[kernels][adam]") {
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    INFO(name_of(storage, decay, amsgrad));
    Samples samples(4);
    AdamArrays before(storage, 100), after(storage, 100);
    before.fill(samples, Fill::plain);
    after.copy_from(before);
    step_on_cpu(after, amsgrad, settings_with(decay), 1);
    const auto is_same = [&](int array) {
      return std::memcmp(after.data(array), before.data(array), before.size(array)) == 0;
    };
    CHECK(is_same(kGradient));
    CHECK_FALSE(is_same(kParameter));
    CHECK_FALSE(is_same(kExpAvg));
    CHECK_FALSE(is_same(kExpAvgSq));
    CHECK(is_same(kMaxExpAvgSq) == !amsgrad);
    if (before.element(kExtra) != 0) CHECK_FALSE(is_same(kExtra));
  });
}

TEST_CASE("a NaN or an infinity does not reach its neighbours", "[kernels][adam]") {
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    INFO(name_of(storage, decay, amsgrad));
    Samples samples(5);
    AdamArrays clean(storage, 200), dirty(storage, 200);
    clean.fill(samples, Fill::plain);
    dirty.copy_from(clean);
    for (const int64_t i : {0, 7, 64, 199}) dirty.set(kGradient, i, i == 7 ? HUGE_VAL : std::nan(""));
    step_on_cpu(clean, amsgrad, settings_with(decay), 1);
    step_on_cpu(dirty, amsgrad, settings_with(decay), 1);
    for (const int64_t i : {0, 7, 64, 199}) {
      REQUIRE(std::isnan(dirty.get(kParameter, i)));
      for (int array = 0; array < kAdamArrays; ++array) {
        std::memcpy(dirty.at(array, i), clean.at(array, i), clean.element(array));
      }
    }
    CHECK(dirty.same_bytes(clean));
  });
}

TEST_CASE("without a gradient, or told to skip, a tensor is left alone", "[kernels][adam]") {
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    INFO(name_of(storage, decay, amsgrad));
    Samples samples(6);
    AdamArrays before(storage, 100), after(storage, 100);
    before.fill(samples, Fill::plain);
    after.copy_from(before);
    AdamGroupScalars go, skip;
    go.set(0, storage, settings_with(decay), 1);
    skip.set(0, storage, settings_with(decay), 1, true);
    const AdamTensor tensor = after.tensor();
    const Tile tile{0, 100, 0};
    const AdamGradient none{nullptr, 0}, some{after.data(kGradient), 0};
    adam_cpu({storage, amsgrad}, tile, &tensor, &none, go.data());
    CHECK(after.same_bytes(before));
    adam_cpu({storage, amsgrad}, tile, &tensor, &some, skip.data());
    CHECK(after.same_bytes(before));
    adam_cpu({storage, amsgrad}, tile, &tensor, &some, go.data());
    CHECK_FALSE(after.same_bytes(before));
  });
}

TEST_CASE("every tensor of a call uses the scalars that its gradient names", "[kernels][adam]") {
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    INFO(name_of(storage, decay, amsgrad));
    Samples samples(7);
    constexpr int64_t kTensors = 5, kGroups[kTensors] = {2, 0, 1, 2, 0};
    std::vector<int64_t> counts;
    std::vector<AdamArrays> together, alone;
    std::vector<AdamTensor> tensors;
    std::vector<AdamGradient> gradients;
    AdamGroupScalars scalars(3);
    const auto settings_of = [&](int64_t group) {
      RuleSettings settings = settings_with(decay);
      settings.learning_rate *= static_cast<double>(group + 1);
      return settings;
    };
    for (int64_t group = 0; group < 3; ++group)
      scalars.set(group, storage, settings_of(group), 10 * group + 1);
    for (int64_t t = 0; t < kTensors; ++t) {
      counts.push_back(t == 3 ? 0 : 50 + 31 * t);
      together.emplace_back(storage, counts.back());
      together.back().fill(samples, Fill::plain);
      alone.emplace_back(storage, counts.back());
      alone.back().copy_from(together.back());
      tensors.push_back(together.back().tensor(1000 * t));
      gradients.push_back({together.back().data(kGradient), kGroups[t]});
      step_on_cpu(alone.back(), amsgrad, settings_of(kGroups[t]), 10 * kGroups[t] + 1, 64, 1000 * t);
    }
    for (const Tile& tile : make_tiles(counts, 64)) {
      adam_cpu({storage, amsgrad}, tile, tensors.data(), gradients.data(), scalars.data());
    }
    for (size_t t = 0; t < kTensors; ++t) CHECK(differing_elements(together[t], alone[t]) == 0);
  });
}

TEST_CASE("an offset beyond 2^32 elements finds its elements", "[kernels][adam]") {
  // The tensor begins 2^33 + 24 elements before the memory
  // that the tile covers; what lies between is not touched.
  constexpr int64_t kOffset = (int64_t{1} << 33) + 24;
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    INFO(name_of(storage, decay, amsgrad));
    Samples samples(8);
    AdamArrays before(storage, 600), after(storage, 600);
    before.fill(samples, Fill::plain);
    after.copy_from(before);
    const auto moved = [&](int array) {
      return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(after.data(array)) -
                                     static_cast<uintptr_t>(kOffset) * after.element(array));
    };
    const AdamTensor tensor{moved(kParameter),   moved(kExpAvg), moved(kExpAvgSq),
                            moved(kMaxExpAvgSq), moved(kExtra),  7};
    const AdamGradient gradient{moved(kGradient), 0};
    AdamGroupScalars scalars;
    scalars.set(0, storage, settings_with(decay), 3);
    adam_cpu({storage, amsgrad}, Tile{0, 600, kOffset}, &tensor, &gradient, scalars.data());
    const AdamArrays expected = stepped_one_by_one(before, amsgrad, settings_with(decay), 3, kOffset + 7);
    CHECK(differing_elements(after, expected) == 0);
    CHECK(after.guards_are_intact());
  });
}

#if defined(__SSE2__)
TEST_CASE("denormals are computed in full whatever the caller's mode, which is restored", "[kernels][adam]") {
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    INFO(name_of(storage, decay, amsgrad));
    constexpr int64_t kCount = 77;
    Samples samples(9);
    AdamArrays in_full(storage, kCount), flushed(storage, kCount);
    const bool is_double = storage == AdamStorage::f64;
    const bool is_half = storage == AdamStorage::f16_master;
    for (int64_t i = 0; i < kCount; ++i) {
      const double tiny = samples.log_uniform(1e-44, 1e-38) * (is_double ? 1e-270 : 1);
      for (int array = kGradient; array <= kMaxExpAvgSq; ++array) in_full.set(array, i, tiny);
      in_full.set_master(i, static_cast<float>(tiny));
      if (is_half) in_full.set(kGradient, i, samples.log_uniform(6e-8, 6e-5));
    }
    flushed.copy_from(in_full);
    RuleSettings settings = settings_with(decay);
    settings.epsilon = 1;  // keeps the update as small as the rest
    step_on_cpu(in_full, amsgrad, settings, 1);
    bool mode_was_restored = false;
    {
      const FlushedDenormals flush;
      step_on_cpu(flushed, amsgrad, settings, 1);
      mode_was_restored = FlushedDenormals::is_untouched();
    }
    CHECK(mode_was_restored);
    CHECK(flushed.same_bytes(in_full));
    CHECK(in_full.get(kExpAvg, 3) != 0);
  });
}
#endif

}  // namespace pacer::kernels::testing
