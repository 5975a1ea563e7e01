#include <pacer/core/tile.h>

#include <algorithm>
#include <limits>

#include <pacer/core/error.h>

namespace pacer {

int64_t total_elements(const std::vector<int64_t>& counts) {
  int64_t total = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    require(counts[i] >= 0, "tensor ", i, " has a negative number of elements (", counts[i], ")");
    require(total <= std::numeric_limits<int64_t>::max() - counts[i],
            "the tensors together have more than 2^63 - 1 elements");
    total += counts[i];
  }
  return total;
}

std::vector<Tile> make_tiles(const std::vector<int64_t>& counts, int64_t tile_elements) {
  require(tile_elements >= 1 && tile_elements <= std::numeric_limits<uint32_t>::max(),
          "the tile size must be in [1, 2^32), not ", tile_elements);
  require(counts.size() <= std::numeric_limits<uint32_t>::max(),
          "a tile table holds fewer than 2^32 tensors");
  total_elements(counts);

  size_t number_of_tiles = 0;
  for (const int64_t count : counts)
    number_of_tiles += static_cast<size_t>(ceil_divide(count, tile_elements));
  std::vector<Tile> tiles;
  tiles.reserve(number_of_tiles);
  for (size_t tensor = 0; tensor < counts.size(); ++tensor) {
    int64_t offset = 0;
    while (offset < counts[tensor]) {
      const int64_t count = std::min(tile_elements, counts[tensor] - offset);
      tiles.push_back({static_cast<uint32_t>(tensor), static_cast<uint32_t>(count), offset});
      offset += count;
    }
  }
  return tiles;
}

std::vector<TileRange> tile_ranges(const std::vector<Tile>& tiles, size_t tensors) {
  std::vector<TileRange> ranges(tensors);
  for (size_t i = 0; i < tiles.size(); ++i) {
    const uint32_t tensor = tiles[i].tensor;
    require(tensor < tensors, "tile ", i, " is of tensor ", tensor, ", but there are ", tensors, " tensors");
    TileRange& range = ranges[tensor];
    if (range.count == 0) range.first = static_cast<int64_t>(i);
    require(range.first + range.count == static_cast<int64_t>(i), "the tiles of tensor ", tensor,
            " do not lie side by side: tile ", i, " is apart from those before");
    ++range.count;
  }
  return ranges;
}

}  // namespace pacer
