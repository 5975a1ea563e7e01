// Tiles on LibTorch's threads: how the CPU kernels, which are single-threaded, are spread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/Parallel.h>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>

namespace pacer::detail {

// Runs `work(i)` for every tile number i, in shares of at least a full unit's elements.
template <class Work>
void for_each_tile(const std::vector<Tile>& tiles, const Work& work) {
  int64_t elements = 1;
  for (const Tile& tile : tiles) elements += tile.count;
  const auto count = static_cast<int64_t>(tiles.size());
  const int64_t share = std::max<int64_t>(1, kReductionUnit * count / elements);
  at::parallel_for(0, count, share, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i);
  });
}

}  // namespace pacer::detail
