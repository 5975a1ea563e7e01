// The checksum: the published answers of XXH3-128, and pieces against the whole.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include <pacer/files/checksum.h>

#include "support/catch.h"
#include "support/samples.h"

namespace pacer::testing {
namespace {

// The input of xxHash's own test program, tests/sanity_test.c.
std::string xxhash_test_input(size_t bytes) {
  std::string text(bytes, '\0');
  uint64_t generator = 2654435761u;
  for (char& c : text) {
    c = static_cast<char>(generator >> 56);
    generator *= 11400714785074694797u;
  }
  return text;
}

}  // namespace

TEST_CASE("the checksum is XXH3-128 as its authors publish it", "[core][checksum]") {
  const std::pair<size_t, const char*> answers[] = {
      {0, "99aa06d3014798d86001c324468d497f"},    {1, "a6cd5e9392000f6ac44bdff4074eecdb"},
      {6, "082afe0b8162d12a3e7039bdda43cfc6"},    {12, "6e3efd8fc7802b18061a192713f69ad9"},
      {24, "0ce966e4678d37611e7044d28b1b901d"},   {48, "a002ac4e5478227ef942219aed80f67b"},
      {81, "4952f58181ab00425e8bafb9f95fb803"},   {222, "337e09641b948717f1aebd597cec6b3a"},
      {403, "1b6de21e332dd73dcdeb804d65c6dea4"},  {512, "18d2d110dcc9bca1617e49599013cb6b"},
      {2048, "f736557fd47073a5dd59e2c3a5f038e0"}, {2240, "ccb134fbfa7ce49d6e73a90539cf2948"},
      {2367, "e89c0f6ff369b427cb37aeb9e5d361ed"},
  };
  for (const auto& [bytes, answer] : answers) {
    CAPTURE(bytes);
    const std::string text = xxhash_test_input(bytes);
    CHECK(checksum_of(text) == answer);
    CHECK(Checksum().add(text.data(), text.size()).hex() == answer);
  }
}

TEST_CASE("the pieces in which bytes come make no difference to the checksum", "[core][checksum]") {
  Samples samples(1);
  const std::string text = xxhash_test_input(5000);
  for (int i = 0; i < 500; ++i) {
    const auto size = static_cast<size_t>(samples.below(static_cast<int64_t>(text.size())));
    Checksum checksum;
    for (size_t at = 0; at < size;) {
      const size_t piece = std::min(static_cast<size_t>(samples.below(600)), size - at);
      checksum.add(text.data() + at, piece);
      at += piece;
      if (samples.chance(0.1)) checksum.hex();  // asking changes nothing
    }
    REQUIRE(checksum.hex() == checksum_of(text.substr(0, size)));
  }
  Checksum first;
  first.add("a", 1);
  Checksum second = std::move(first);
  second.add(nullptr, 0).add("b", 1);
  CHECK(second.hex() == checksum_of("ab"));
}

TEST_CASE("what is a checksum is told from what is not", "[core][checksum]") {
  const std::string good = checksum_of("x");
  CHECK(is_checksum(good));
  CHECK_FALSE(is_checksum(good.substr(1)));
  CHECK_FALSE(is_checksum(good + '0'));
  for (const char wrong : {'A', 'g', '/', ':', '`', ' ', '\0'}) {
    CHECK_FALSE(is_checksum(wrong + good.substr(1)));
    CHECK_FALSE(is_checksum(good.substr(1) + wrong));
  }
}

}  // namespace pacer::testing
