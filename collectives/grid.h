// Ranks as a grid: pipelines, whose ranks each have one part of a model, and replicas, which have the same
// part and train it on data of their own.
//
//   pacer::Grid grid(world, /*stages=*/4);             // of 8 ranks: two pipelines of four
//   grid.pipeline();                                   // the ranks of this rank's pipeline, in stage order
//   pacer::EpochSampler sampler(size, seed, *grid.replicas());  // all ranks of a pipeline see the same data
//
// Rank r is stage r / n of pipeline r % n, where n is the number of pipelines: replicas follow one another,
// so that those who add up whole gradients are near each other, and only activations travel far.
#pragma once

#include <memory>

#include <pacer/collectives/communicator.h>

namespace pacer {

class Grid {
 public:
  // All ranks of `world` call it with the same number. Throws InvalidArgument where `stages` is below 1 or
  // does not divide the number of ranks.
  explicit Grid(std::shared_ptr<Communicator> world, int stages = 1);

  int stages() const { return pipeline_->world_size(); }
  // The stage of this rank, from 0.
  int stage() const { return pipeline_->rank(); }
  int pipelines() const { return replicas_->world_size(); }

  const std::shared_ptr<Communicator>& world() const { return world_; }
  // The ranks of this rank's pipeline; rank s there has stage s.
  const std::shared_ptr<Communicator>& pipeline() const { return pipeline_; }
  // The ranks that have this rank's stage, one of each pipeline.
  const std::shared_ptr<Communicator>& replicas() const { return replicas_; }
  // The number in the world of the rank that has that stage in this rank's pipeline.
  int rank_of(int stage) const { return stage * pipelines() + replicas_->rank(); }

 private:
  std::shared_ptr<Communicator> world_, pipeline_, replicas_;
};

}  // namespace pacer
