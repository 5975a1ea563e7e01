// All 1-bit optimizers and difficult numbers: gradients that are not finite (N2) or all zero (N3), and 16-bit
// parameters.
#include <iterator>
#include <limits>
#include <type_traits>

#include "support/catch.h"

#include "support/kernels/half_reference.h"
#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_refusals.h"

namespace pacer::testing::onebit_numbers {
namespace {

struct Place {
  size_t parameter;
  int64_t element;
};

// "" if attempt number `attempt`, with one number that is not finite, changes nothing, and what follows is
// what it would be had it only been counted.
template <class O>
std::string unless_skipped(at::ScalarType dtype, int64_t attempt, size_t spoilt_rank, const Place& place,
                           float value) {
  const OptionsOf<O> options = Family<O>::refreshed(OptionsOf<O>(0.01).freeze_step(3), 3);
  const GroupsOf<O> groups = {{{{130}, {1}, {0, 2}, {300}}, options},
                              {{{17}}, OptionsOf<O>(options).compress(false)}};
  OneBitRanks<O> ranks(3, groups, dtype);
  auto textbook = textbook_of(ranks, groups);
  for (int64_t t = 0; t < attempt + 4; ++t) {
    auto gradients = ranks.gradients(t);
    if (t == attempt) gradients[spoilt_rank][place.parameter].view({-1})[place.element] = value;
    const auto before = t == attempt ? everything(ranks) : std::vector<NamedTensors>();
    const std::string message = ranks.step(gradients);
    if (!message.empty()) return message;
    textbook.step(textbook_gradients(gradients));
    const std::string changed = t == attempt ? first_change(before, everything(ranks)) : "";
    if (!changed.empty()) return "changed: " + changed;
    const std::string different = difference_from(textbook, ranks);
    if (!different.empty()) return different + " after attempt " + std::to_string(t);
    for (const auto& optimizer : ranks.optimizers) {
      if (optimizer->skipped_steps() != (t >= attempt ? 1 : 0)) return "skipped_steps";
    }
  }
  return "";
}

}  // namespace

TEMPLATE_TEST_CASE("N2: a gradient that is not finite on one rank changes nothing on any",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  // The last one is finite, but its square is not.
  const float values[] = {NAN, kInfinity, -kInfinity, 3e38f};
  // First, at the edges of a byte and of a unit of padding, last before the padding, alone, in the middle,
  // last, and where nothing is compressed.
  const Place places[] = {{0, 0}, {0, 7}, {0, 127}, {0, 128}, {0, 129}, {1, 0}, {3, 150}, {3, 299}, {4, 16}};
  // Each place is spoilt on one of the ranks, in another attempt on another one, unless tests may take long.
  const bool on_all_ranks = wants_long_tests();
  size_t number = 0;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t attempt : {1, 3, 5}) {  // warm-up, the first that is compressed, a later one
      for (size_t rank = 0; rank < 3; ++rank) {
        for (size_t i = 0; i < std::size(places); ++i) {
          if (!on_all_ranks && (i + static_cast<size_t>(attempt) / 2) % 3 != rank) continue;
          const Place& place = places[i];
          const float value = values[number++ % 4];
          CAPTURE(dtype, attempt, rank, place.parameter, place.element, value);
          REQUIRE(unless_skipped<TestType>(dtype, attempt, rank, place, value) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("gradients that are all zero postpone the freeze until one is not (N3)",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  for (const double weight_decay : {0.0, 0.1}) {
    const O options = O(0.01).freeze_step(2).weight_decay(weight_decay);
    const GroupsOf<TestType> groups = {{{{40}, {5, 5}}, options}, {{{6}}, O(options).compress(false)}};
    OneBitRanks<TestType> ranks(3, groups);
    auto textbook = textbook_of(ranks, groups);
    for (int64_t t = 1; t <= 12; ++t) {
      CAPTURE(weight_decay, t);
      REQUIRE(differ_after(ranks, textbook, 1, [&](int64_t, auto& gradients) {
                for (auto& of_rank : gradients) {
                  if (t <= 4) of_rank[0].zero_();
                  if (t != 8) of_rank[1].zero_();
                }
              }) == "");
      REQUIRE(textbook.frozen_at == (t >= 5 ? std::optional<int64_t>(5) : std::nullopt));
      REQUIRE(contains(ranks.said[0], "no gradient was ever other than zero") == (t >= 2));
      if constexpr (std::is_same_v<TestType, OneBitLamb>) {
        // Weight decay alone made the first updates, and their ratios are not averaged.
        REQUIRE(textbook.parameters[0].averaged == (t >= 5 ? 1 : 0));
      }
      if (t == 3) ranks.resume();
    }
  }
}

TEMPLATE_TEST_CASE("a freeze waits for a gradient where one element is all that is compressed, too (N3)",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  OneBitRanks<TestType> ranks(1, {{{{1}}, OptionsOf<TestType>(0.01).freeze_step(2)}});
  for (int64_t t = 1; t <= 5; ++t) {
    auto gradients = ranks.gradients(t);
    if (t < 5) gradients[0][0].zero_();
    REQUIRE(ranks.step(gradients) == "");
    CHECK(ranks.optimizers[0]->frozen_at().has_value() == (t == 5));
  }
}

TEMPLATE_TEST_CASE("16-bit parameters are the textbook's fp32 values, to the bit, and those rounded",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  const std::pair<at::ScalarType, MasterWeights> kinds[] = {{at::kBFloat16, MasterWeights::remainder},
                                                            {at::kBFloat16, MasterWeights::automatic},
                                                            {at::kBFloat16, MasterWeights::fp32},
                                                            {at::kHalf, MasterWeights::automatic}};
  for (const auto& [dtype, master_weights] : kinds) {
    for (const int world_size : {1, 2, 3, 4}) {
      CAPTURE(dtype, static_cast<int>(master_weights), world_size);
      O options = Family<TestType>::refreshed(O(0.01).freeze_step(3).compress_alone(true), 6);
      options.master_weights(master_weights).weight_decay(0.1);
      const GroupsOf<TestType> groups = {{{{35, 3}, {1}, {0}, {2049}}, options},
                                         {{{50}}, O(options).compress(false)}};
      OneBitRanks<TestType> ranks(world_size, groups, dtype);
      auto textbook = textbook_of(ranks, groups);
      REQUIRE(differ_after(ranks, textbook, 12) == "");
      ranks.resume();
      REQUIRE(differ_after(ranks, textbook, 18) == "");
      const bool has_remainder = dtype == at::kBFloat16 && master_weights != MasterWeights::fp32;
      for (size_t i = 0; i < textbook.parameters.size(); ++i) {
        const auto stored = to_doubles(ranks.parameters.back()[i]);
        for (size_t k = 0; k < stored.size(); ++k) {
          const HalfFormat format = dtype == at::kHalf ? kFloat16Format : kBFloat16Format;
          const Ties ties = has_remainder ? Ties::away : Ties::to_even;
          REQUIRE(stored[k] == nearest_half(textbook.parameters[i].value[k], format, ties));
        }
      }
    }
  }
}

}  // namespace pacer::testing::onebit_numbers
