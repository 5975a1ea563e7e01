#include <pacer/optimizers/detail/paged_table.h>

#include <algorithm>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/kernels/lamb_8bit.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

size_t PagedTable::add_launch(const std::vector<PagedPiece>& pieces) {
  Launch launch{positions_.size(), pieces.size(), tiles_.host().size(), 0, 0, std::nullopt};
  std::vector<int64_t> counts;
  for (const PagedPiece& piece : pieces) {
    counts.push_back(piece.count);
    positions_.push_back(piece.position);
    tensors_.host().push_back(piece.tensor);
    gradients_.host().push_back({nullptr, 0});
  }
  add_tiles(pieces, launch);
  if (rule_ == kernels::UpdateRule::lamb) {
    launch.lamb.emplace(launch_.storage, has_codes_ ? kernels::kLamb8BitLoops : kernels::kLambLoops, counts,
                        std::vector<kernels::LambAverage*>(counts.size()), device_);
  }
  launches_.push_back(std::move(launch));
  return launches_.size() - 1;
}

void PagedTable::add_tiles(const std::vector<PagedPiece>& pieces, Launch& launch) {
  const bool on_cpu = device_.is_cpu();
  std::vector<int64_t> counts;
  for (const PagedPiece& piece : pieces) counts.push_back(piece.count);
  std::vector<Tile> tiles =
      make_tiles(counts, on_cpu ? kReductionUnit : kernels::adam_cuda_block_tile(launch_.storage));
  for (Tile& tile : tiles) tile.offset += pieces[tile.tensor].first;
  if (!on_cpu) {
    const int64_t warp_tile = kernels::adam_cuda_warp_tile(launch_.storage);
    launch.large_tiles = std::stable_partition(tiles.begin(), tiles.end(),
                                               [&](const Tile& tile) { return tile.count > warp_tile; }) -
                         tiles.begin();
  }
  launch.tiles = static_cast<int64_t>(tiles.size());
  tiles_.host().insert(tiles_.host().end(), tiles.begin(), tiles.end());
}

void PagedTable::set_gradients(const std::vector<kernels::AdamGradient>& of_table) {
  for (size_t i = 0; i < positions_.size(); ++i) {
    const kernels::AdamGradient& wanted = of_table[positions_[i]];
    kernels::AdamGradient& current = gradients_.host()[i];
    if (current.gradient == wanted.gradient && current.scalars == wanted.scalars) continue;
    current = wanted;
    gradients_.mark_changed();
  }
}

void PagedTable::send() {
  tensors_.send(device_);
  gradients_.send(device_);
  tiles_.send(device_);
  for (Launch& launch : launches_) {
    if (launch.lamb) launch.lamb->send();
  }
}

bool PagedTable::takes_part(size_t number) const {
  const Launch& launch = launches_[number];
  const auto begin = gradients_.host().begin() + static_cast<std::ptrdiff_t>(launch.first_piece);
  return std::any_of(begin, begin + static_cast<std::ptrdiff_t>(launch.pieces),
                     [](const kernels::AdamGradient& gradient) { return gradient.gradient != nullptr; });
}

void PagedTable::step(size_t number, const kernels::StepScalars* scalars, bool follows_prologue) {
  Launch& launch = launches_[number];
  const kernels::AdamTensor* const tensors = tensors_.pointer() + launch.first_piece;
  const kernels::AdamGradient* const gradients = gradients_.pointer() + launch.first_piece;
  const Tile* const tiles = tiles_.pointer() + launch.first_tile;
  const kernels::AdamTiles on_gpu{tiles, launch.large_tiles, launch.tiles - launch.large_tiles};
  if (launch.lamb) return launch.lamb->step({tensors, gradients, scalars}, on_gpu, follows_prologue);
  if (device_.is_cuda()) {
    kernels::AdamLaunch choice = launch_;
    choice.follows_prologue = follows_prologue;
    const auto run = choice.loops != nullptr ? choice.loops->cuda : kernels::adam_cuda;
    return run(choice, on_gpu, tensors, gradients, scalars, current_stream(device_));
  }
  const auto first = static_cast<int64_t>(launch.first_tile);
  const auto run = launch_.loops != nullptr ? launch_.loops->cpu : kernels::adam_cpu;
  for_each_tile(tiles_.host(), first, first + launch.tiles, [&](int64_t i) {
    run(launch_, tiles_.host()[static_cast<size_t>(i)], tensors, gradients, scalars);
  });
}

double PagedTable::trust_ratio(size_t position) const {
  for (const Launch& launch : launches_) {
    for (size_t i = 0; launch.lamb && i < launch.pieces; ++i) {
      if (positions_[launch.first_piece + i] == position) return launch.lamb->ratio(i);
    }
  }
  return 1;
}

}  // namespace pacer::detail
