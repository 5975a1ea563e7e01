// Tiles on LibTorch's threads: how the CPU kernels, which are single-threaded, are spread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/Parallel.h>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>

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

}  // namespace pacer::detail
