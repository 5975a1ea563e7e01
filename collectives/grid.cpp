#include <pacer/collectives/grid.h>

#include <utility>

#include <pacer/core/error.h>

namespace pacer {

Grid::Grid(std::shared_ptr<Communicator> world, int stages) : world_(std::move(world)) {
  require(world_ != nullptr, "Grid was given no Communicator; pass the one of all ranks");
  const int ranks = world_->world_size();
  require(stages >= 1 && ranks % stages == 0, "Grid: ", ranks, " ranks cannot be pipelines of ", stages,
          " stages each; start a multiple of ", stages > 0 ? stages : 1,
          " ranks, or cut the model otherwise");
  const int pipelines = ranks / stages, rank = world_->rank();
  pipeline_ = world_->split(rank % pipelines, rank, "pipeline");
  replicas_ = world_->split(rank / pipelines, rank, "replicas");
}

}  // namespace pacer
