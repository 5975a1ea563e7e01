// Muon's momentum in 8 bits: the loops against decoded momentum, the rule and codes anew, and what they leave alone.
#include <cmath>
#include <cstring>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/kernels/muon_8bit.h>

#include "support/catch.h"
#include "support/kernels/coded_arrays.h"

namespace pacer::kernels::testing {
namespace {

RuleSettings momentum_settings() {
  RuleSettings settings = settings_with(WeightDecay::decoupled);
  settings.beta1 = 0.95;
  settings.bias_correction = 0;
  return settings;
}

// Runs over tiles of this size; with directions they are written, without the momentum changes.
template <class Direction>
void run_tiles(CodedArrays& coded, DirectionType type, bool nesterov, std::vector<Direction>* directions,
               int64_t tile_elements, const void* gradient_data, bool skip = false) {
  AdamGroupScalars scalars;
  scalars.set(0, coded.arrays.storage(), momentum_settings(), 3, skip);
  const AdamTensor tensor = coded.tensor();
  const AdamGradient gradient{gradient_data, 0};
  void* const places[] = {directions == nullptr ? nullptr : directions->data()};
  for (const Tile& tile : make_tiles({coded.count()}, tile_elements)) {
    muon_8bit_momentum_cpu({coded.arrays.storage(), type, nesterov}, tile, &tensor, &gradient,
                           directions == nullptr ? nullptr : places, scalars.data());
  }
}

}  // namespace

TEST_CASE("a momentum in 8 bits gives the directions of the new one, and is stored as its codes",
          "[kernels][muon][adam8]") {
  for_every_coded([](auto storage) {
    for (const int64_t count : {1, 31, 32, 33, 95, 1000, 2500}) {
      for (const bool nesterov : {false, true}) {
        INFO(name_of(storage()) << ", " << count << " elements" << (nesterov ? ", nesterov" : ""));
        Samples samples(static_cast<uint64_t>(count + 7));
        CodedArrays coded(storage(), count, 3), wanted(storage(), count);
        coded.fill(samples, Fill::mixed);
        wanted.copy_from(coded);
        const auto scalars = adam_scalars<float>(momentum_settings(), 3);
        std::vector<float> m = wanted.moments(Moment::first), found(m.size(), 77);
        std::vector<BFloat16> rounded(m.size());
        run_tiles(coded, DirectionType::f32, nesterov, &found, 480, coded.arrays.data(kGradient));
        run_tiles(coded, DirectionType::bf16, nesterov, &rounded, 64, coded.arrays.data(kGradient));
        REQUIRE(differing_elements(coded, wanted) == 0);  // directions change nothing
        for (int64_t i = 0; i < count; ++i) {
          const auto at = static_cast<size_t>(i);
          const float g = scalars.factor * static_cast<float>(coded.arrays.get(kGradient, i));
          m[at] = std::fma(scalars.one_minus_beta1, g - m[at], m[at]);
          const float direction = nesterov ? std::fma(scalars.one_minus_beta1, g - m[at], m[at]) : m[at];
          REQUIRE(found[at] == direction);
          REQUIRE(rounded[at].bits == to_bfloat16(direction).bits);
        }
        encode_moments_cpu(Moment::first, m.data(), count, wanted.exp_avg.data(),
                           wanted.exp_avg_scale.data());
        run_tiles<float>(coded, DirectionType::f32, nesterov, nullptr, 96, coded.arrays.data(kGradient));
        REQUIRE(differing_elements(coded, wanted) == 0);
        REQUIRE(coded.arrays.guards_are_intact());
      }
    }
  });
}

TEST_CASE("a momentum in 8 bits stays without a gradient, and in a step that is skipped",
          "[kernels][muon][adam8]") {
  Samples samples(4);
  CodedArrays coded(AdamStorage::bf16_remainder, 1511), before(AdamStorage::bf16_remainder, 1511);
  coded.fill(samples, Fill::plain);
  before.copy_from(coded);
  run_tiles<float>(coded, DirectionType::f32, true, nullptr, 512, nullptr);
  run_tiles<float>(coded, DirectionType::f32, true, nullptr, 512, coded.arrays.data(kGradient),
                   /*skip=*/true);
  CHECK(differing_elements(coded, before) == 0);
  const AdamTensor tensor = coded.tensor();
  const AdamGradient gradient{coded.arrays.data(kGradient), 0};
  AdamGroupScalars scalars;
  scalars.set(0, AdamStorage::f32, momentum_settings(), 1);
  CHECK_THROWS_AS(muon_8bit_momentum_cpu({AdamStorage::f64, DirectionType::f64, true}, Tile{0, 8, 0}, &tensor,
                                         &gradient, nullptr, scalars.data()),
                  InvalidArgument);
}

}  // namespace pacer::kernels::testing
