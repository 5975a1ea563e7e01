// How lists of tensors are cut into tiles, in sizes far
// beyond 2^32 elements (no memory of that size is needed).
#include <limits>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/core/tile.h>

#include "support/catch.h"
#include "support/samples.h"

using Catch::Matchers::ContainsSubstring;

namespace pacer::testing {
namespace {

constexpr int64_t kMostElements = std::numeric_limits<int64_t>::max();
constexpr int64_t kMostPerTile = (int64_t{1} << 32) - 1;

// Empty if the tiles cover every element of every tensor exactly once and in order, else what is wrong.
std::string flaw_in_tiles(const std::vector<Tile>& tiles, const std::vector<int64_t>& counts,
                          int64_t tile_elements) {
  size_t next = 0;
  for (size_t tensor = 0; tensor < counts.size(); ++tensor) {
    int64_t covered = 0;
    while (covered < counts[tensor]) {
      if (next == tiles.size()) return "tiles are missing";
      const Tile& tile = tiles[next++];
      if (tile.tensor != tensor) return "a tile names another tensor";
      if (tile.offset != covered) return "a tile begins at another element";
      if (tile.count == 0) return "a tile is empty";
      if (tile.count > tile_elements) return "a tile is too large";
      covered += tile.count;
      if (covered > counts[tensor]) return "a tile crosses the end of its tensor";
      if (tile.count < tile_elements && covered != counts[tensor]) return "a tile in the middle is short";
    }
  }
  return next == tiles.size() ? "" : "there are tiles too many";
}

}  // namespace

TEST_CASE("a tile takes 16 bytes", "[core][tile]") {
  CHECK(sizeof(Tile) == 16);
  CHECK(alignof(Tile) == 16);
}

TEST_CASE("a tile never crosses a tensor and none is left out", "[core][tile]") {
  Samples samples(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> counts(static_cast<size_t>(samples.below(40)));
    for (int64_t& count : counts) count = samples.chance(0.2) ? 0 : samples.below(5000);
    const int64_t tile_elements = 1 + samples.below(samples.chance(0.5) ? 8 : 3000);
    REQUIRE(flaw_in_tiles(make_tiles(counts, tile_elements), counts, tile_elements) == "");
  }
}

TEST_CASE("an exact multiple of the tile size leaves no empty tile behind", "[core][tile]") {
  for (const int64_t count : {512, 1024, 5120}) {
    CHECK(make_tiles({count}, 512).size() == static_cast<size_t>(count / 512));
    CHECK(make_tiles({count - 1}, 512).size() == static_cast<size_t>(count / 512));
    CHECK(make_tiles({count + 1}, 512).size() == static_cast<size_t>(count / 512 + 1));
  }
}

TEST_CASE("empty lists and empty tensors have no tiles", "[core][tile]") {
  CHECK(make_tiles({}, 512).empty());
  CHECK(make_tiles({0}, 512).empty());
  CHECK(make_tiles({0, 0, 0}, 1).empty());
  for (size_t slot = 0; slot < 5; ++slot) {
    std::vector<int64_t> counts(5, 700);
    counts[slot] = 0;
    CHECK(flaw_in_tiles(make_tiles(counts, 512), counts, 512) == "");
  }
}

TEST_CASE("offsets beyond 2^32 elements are exact", "[core][tile]") {
  const std::vector<std::vector<int64_t>> lists{
      {(int64_t{1} << 31) + 1, 5},          {(int64_t{1} << 32) + 1, 0, 3, (int64_t{1} << 33) - 1},
      {int64_t{1} << 32, int64_t{1} << 32}, {1, int64_t{1} << 40, 1},
      {(int64_t{1} << 47) + 12345},
  };
  for (const std::vector<int64_t>& counts : lists) {
    for (const int64_t tile_elements : {int64_t{1} << 31, (int64_t{1} << 31) + 7, kMostPerTile}) {
      CHECK(flaw_in_tiles(make_tiles(counts, tile_elements), counts, tile_elements) == "");
    }
  }
  const std::vector<Tile> tiles = make_tiles({(int64_t{1} << 47) + 12345}, int64_t{1} << 31);
  CHECK(tiles.size() == (size_t{1} << 16) + 1);
  CHECK(tiles.back().offset == int64_t{1} << 47);
  CHECK(tiles.back().count == 12345);
}

TEST_CASE("tile sizes from 1 to 2^32 - 1 are accepted and no others", "[core][tile]") {
  CHECK(make_tiles({3}, 1).size() == 3);
  CHECK(make_tiles({kMostPerTile}, kMostPerTile).size() == 1);
  CHECK(make_tiles({kMostPerTile + 1}, kMostPerTile).size() == 2);
  CHECK_THROWS_AS(make_tiles({3}, 0), InvalidArgument);
  CHECK_THROWS_AS(make_tiles({3}, -1), InvalidArgument);
  CHECK_THROWS_AS(make_tiles({3}, kMostPerTile + 1), InvalidArgument);
  CHECK_THROWS_AS(make_tiles({}, 0), InvalidArgument);
}

TEST_CASE("a negative count is refused with its place and value", "[core][tile]") {
  using Catch::Matchers::ContainsSubstring;
  CHECK_THROWS_AS(make_tiles({3, -7}, 512), InvalidArgument);
  CHECK_THROWS_WITH(total_elements({3, 4, -7}), ContainsSubstring("tensor 2") && ContainsSubstring("-7"));
  CHECK_THROWS_AS(total_elements({std::numeric_limits<int64_t>::min()}), InvalidArgument);
}

TEST_CASE("the total is exact up to 2^63 - 1 and refused beyond", "[core][tile]") {
  constexpr int64_t kHalf = int64_t{1} << 62;
  CHECK(total_elements({}) == 0);
  CHECK(total_elements({0, 0}) == 0);
  CHECK(total_elements({1, 2, 3, 0, 4}) == 10);
  CHECK(total_elements({int64_t{1} << 31, int64_t{1} << 31, 5}) == (int64_t{1} << 32) + 5);
  CHECK(total_elements({kHalf, kHalf - 1}) == kMostElements);
  CHECK(total_elements({kMostElements, 0}) == kMostElements);
  CHECK_THROWS_AS(total_elements({kHalf, kHalf}), InvalidArgument);
  CHECK_THROWS_AS(total_elements({kMostElements, 1}), InvalidArgument);
  CHECK_THROWS_AS(total_elements({1, kMostElements}), InvalidArgument);
  CHECK_THROWS_AS(total_elements({kHalf, kHalf, kHalf, kHalf, 5}), InvalidArgument);  // 5 modulo 2^64
  CHECK_THROWS_AS(make_tiles({kHalf, kHalf}, kMostPerTile), InvalidArgument);
}

TEST_CASE("every tensor's tiles are found in a list, in whatever order tensors are", "[core][tile]") {
  const std::vector<Tile> tiles = {{2, 4, 0}, {2, 4, 4}, {0, 4, 0}, {3, 1, 0}, {3, 4, 8}, {3, 4, 4}};
  const std::vector<TileRange> ranges = tile_ranges(tiles, 5);
  const std::vector<std::pair<int64_t, int64_t>> expected = {{2, 1}, {0, 0}, {0, 2}, {3, 3}, {0, 0}};
  REQUIRE(ranges.size() == expected.size());
  for (size_t i = 0; i < ranges.size(); ++i) {
    CAPTURE(i);
    CHECK(ranges[i].first == expected[i].first);
    CHECK(ranges[i].count == expected[i].second);
  }
  CHECK(tile_ranges({}, 0).empty());
  CHECK_THROWS_WITH(tile_ranges(tiles, 3), ContainsSubstring("tile 3") && ContainsSubstring("3 tensors"));
  CHECK_THROWS_WITH(tile_ranges({{1, 4, 0}, {0, 4, 0}, {1, 4, 4}}, 2),
                    ContainsSubstring("tensor 1") && ContainsSubstring("tile 2"));
}

TEST_CASE("division rounds up, also where the usual formula would overflow", "[core][tile]") {
  CHECK(ceil_divide(0, 7) == 0);
  CHECK(ceil_divide(1, 7) == 1);
  CHECK(ceil_divide(7, 7) == 1);
  CHECK(ceil_divide(8, 7) == 2);
  CHECK(ceil_divide(kMostElements, 1) == kMostElements);
  CHECK(ceil_divide(kMostElements, 2) == int64_t{1} << 62);
  CHECK(ceil_divide(kMostElements, kMostElements) == 1);
  CHECK(ceil_divide((int64_t{1} << 62) + 1, int64_t{1} << 31) == (int64_t{1} << 31) + 1);
  Samples samples(2);
  for (int i = 0; i < 10000; ++i) {
    const int64_t divisor = 1 + samples.below(int64_t{1} << (1 + samples.below(40)));
    const int64_t quotient = samples.below(int64_t{1} << 20), rest = samples.below(divisor);
    REQUIRE(ceil_divide(quotient * divisor + rest, divisor) == (rest == 0 ? quotient : quotient + 1));
    const int64_t rounded = round_up(quotient * divisor + rest, divisor);
    REQUIRE(rounded == (rest == 0 ? quotient : quotient + 1) * divisor);
  }
}

}  // namespace pacer::testing
