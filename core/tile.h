// Tiles: how a list of tensors of any count and size is cut into pieces that one thread block or one CPU task
// works on. All sizes and offsets are 64-bit; a tile never crosses a tensor. No memory of any tensor is
// touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <pacer/core/host_device.h>

namespace pacer {

// `count` consecutive elements of tensor number `tensor`, from element `offset` on. 16 bytes, so that a
// thread block fetches its tile with one load.
struct alignas(16) Tile {
  uint32_t tensor;
  uint32_t count;
  int64_t offset;  // elements
};

// Rounds up; both arguments in the same unit, value >= 0, divisor > 0.
PACER_HOST_DEVICE int64_t ceil_divide(int64_t value, int64_t divisor) {
  return value / divisor + (value % divisor != 0);
}

// The smallest multiple of `multiple` that is >= value.
PACER_HOST_DEVICE int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_divide(value, multiple) * multiple;
}

// Cuts tensors with these element counts into tiles of at most `tile_elements`, in order. Empty tensors get
// no tile. Throws InvalidArgument on a negative count, a tile size outside [1, 2^32), or 2^32 tensors and
// more.
std::vector<Tile> make_tiles(const std::vector<int64_t>& counts, int64_t tile_elements);

// Tiles [first, first + count) of a list.
struct TileRange {
  int64_t first = 0;
  int64_t count = 0;
};

// Where the tiles of each tensor are; a tensor without tiles has {0, 0}. Throws InvalidArgument where those
// of one tensor do not lie side by side, or a tile is of no tensor in [0, tensors).
std::vector<TileRange> tile_ranges(const std::vector<Tile>& tiles, size_t tensors);

// Sum of the counts; throws InvalidArgument where it would pass 2^63 - 1 or a count is negative.
int64_t total_elements(const std::vector<int64_t>& counts);

}  // namespace pacer
