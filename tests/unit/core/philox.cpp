// Philox4x32-10 against published answers, and the layout of key and counter.
#include <array>
#include <set>
#include <utility>

#include <pacer/core/philox.h>

#include "support/catch.h"
#include "support/samples.h"

namespace pacer::testing {
namespace {

using Words = std::array<uint32_t, 4>;

Words words_of(const PhiloxCounter& counter) {
  return {counter.word[0], counter.word[1], counter.word[2], counter.word[3]};
}

Words philox(Words counter, std::array<uint32_t, 2> key) {
  return words_of(philox4x32_10({{key[0], key[1]}}, {{counter[0], counter[1], counter[2], counter[3]}}));
}

// The paper's figure 2 from the last round back to the first: two Feistel halves (left, right) that swap
// places. The key of round r is the first key plus r times an odd constant.
Words philox_by_recursion(const Words& counter, uint64_t key, int rounds) {
  if (rounds == 0) return counter;
  const Words before = philox_by_recursion(counter, key, rounds - 1);
  const uint64_t r = static_cast<uint64_t>(rounds) - 1;
  const uint64_t key0 = (key + r * 0x9E3779B9u) & 0xFFFFFFFFu;
  const uint64_t key1 = ((key >> 32) + r * 0xBB67AE85u) & 0xFFFFFFFFu;
  const auto multiply = [](uint32_t a, uint32_t b) {
    const uint64_t product = uint64_t{a} * b;
    return std::pair<uint64_t, uint64_t>(product >> 32, product % (uint64_t{1} << 32));
  };
  const auto [high_even, low_even] = multiply(before[0], 0xD2511F53u);
  const auto [high_odd, low_odd] = multiply(before[2], 0xCD9E8D57u);
  return {static_cast<uint32_t>(high_odd ^ before[1] ^ key0), static_cast<uint32_t>(low_odd),
          static_cast<uint32_t>(high_even ^ before[3] ^ key1), static_cast<uint32_t>(low_even)};
}

}  // namespace

TEST_CASE("Philox gives the published answers", "[core][philox]") {
  // kat_vectors of the authors' Random123 library: all zeros, all ones, digits of pi.
  CHECK(philox({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("Philox equals its definition by recursion for random keys and counters", "[core][philox]") {
  Samples samples(1);
  for (int i = 0; i < 2000; ++i) {
    const uint64_t key = samples.bits(), low = samples.bits(), high = samples.bits();
    const Words counter{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                        static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)};
    REQUIRE(philox(counter, {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)}) ==
            philox_by_recursion(counter, key, 10));
  }
}

TEST_CASE("the key is the seed, low word first", "[core][philox]") {
  const PhiloxKey key = philox_key(0x0123456789abcdefu);
  CHECK(key.word[0] == 0x89abcdefu);
  CHECK(key.word[1] == 0x01234567u);
}

TEST_CASE("the counter holds index, step, micro-step and stream in their places", "[core][philox]") {
  CHECK(words_of(philox_counter(0x1122334455667788u, 5, 3, RandomStream::layer_drop)) ==
        Words{0x55667788, 0x11223344, 5, 3});
  CHECK(words_of(philox_counter(0x1122334455667788u, 5, 3, RandomStream::stochastic_rounding)) ==
        Words{0x55667788, 0x11223344, 5, 0x01000003});
  // The step counts modulo 2^32.
  CHECK(words_of(philox_counter(0, (uint64_t{1} << 32) + 7, 0, RandomStream::layer_drop)) ==
        Words{0, 0, 7, 0});
}

TEST_CASE("a draw changes with the seed, the index, the step, the micro-step and the stream",
          "[core][philox]") {
  const auto draw = [](uint64_t seed, uint64_t index, uint64_t step, uint32_t micro_step,
                       RandomStream stream) {
    return words_of(philox4x32_10(philox_key(seed), philox_counter(index, step, micro_step, stream)));
  };
  constexpr auto kDrop = RandomStream::layer_drop, kRounding = RandomStream::stochastic_rounding;
  constexpr uint64_t kHigh = uint64_t{1} << 32;
  const std::set<Words> draws{draw(0, 0, 0, 0, kDrop),     draw(1, 0, 0, 0, kDrop),
                              draw(kHigh, 0, 0, 0, kDrop), draw(0, 1, 0, 0, kDrop),
                              draw(0, kHigh, 0, 0, kDrop), draw(0, 0, 1, 0, kDrop),
                              draw(0, 0, 0, 1, kDrop),     draw(0, 0, 0, 0, kRounding)};
  CHECK(draws.size() == 8);
}

}  // namespace pacer::testing
