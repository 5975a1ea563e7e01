// Tiles at work: on LibTorch's threads, over which the CPU kernels, which are single-threaded, are spread,
// and in the two sizes that GPU kernels take.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/Parallel.h>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/adam.h>

namespace pacer::detail {

// Runs `work(i)` for the tile numbers i from `begin` to before `end`, in shares of at least a full unit's
// elements.
template <class Work>
void for_each_tile(const std::vector<Tile>& tiles, int64_t begin, int64_t end, const Work& work) {
  int64_t elements = 1;
  for (int64_t i = begin; i < end; ++i) elements += tiles[static_cast<size_t>(i)].count;
  const int64_t share = std::max<int64_t>(1, kReductionUnit * (end - begin) / elements);
  at::parallel_for(begin, end, share, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) work(i);
  });
}

// The same for all of them.
template <class Work>
void for_each_tile(const std::vector<Tile>& tiles, const Work& work) {
  for_each_tile(tiles, 0, static_cast<int64_t>(tiles.size()), work);
}

// Calls work(part) for what of the tile lies in visible rows, in as few parts as there can be.
template <class Work>
void for_visible_parts(const Tile& tile, const kernels::RowMask& rows, const Work& work) {
  if (rows.visible == nullptr) return work(tile);
  const int64_t end = tile.offset + tile.count;
  for (int64_t begin = tile.offset; begin < end;) {
    int64_t row = begin / rows.width;
    if (!rows.visible[row]) {
      begin = (row + 1) * rows.width;
      continue;
    }
    while ((row + 1) * rows.width < end && rows.visible[row + 1]) ++row;
    Tile part = tile;
    part.offset = begin;
    part.count = std::min(end, (row + 1) * rows.width) - begin;
    work(part);
    begin += part.count;
  }
}

// Tiles for a GPU: large ones, which get a block of threads each, come before small ones, which get a warp.
struct TilesBySize {
  DeviceBuffer<Tile> buffer;
  int64_t large = 0;

  template <class IsLarge>
  void sort(const IsLarge& is_large) {
    auto& all = buffer.host();
    large = std::stable_partition(all.begin(), all.end(), is_large) - all.begin();
  }
  kernels::AdamTiles view() const {
    return {buffer.pointer(), large, static_cast<int64_t>(buffer.host().size()) - large};
  }
};

}  // namespace pacer::detail
