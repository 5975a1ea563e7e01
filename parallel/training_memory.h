// How many bytes training takes on each rank beside activations, known before it starts.
//
//   auto memory = pacer::training_memory(
//       pacer::TrainingMemoryOptions(7'000'000'000)
//           .ranks(8).dtype(at::kBFloat16).sharded(pacer::Sharded::gradients));
//   std::printf("%.1f GB a rank\n", memory.total() / 1e9);
//
// The program pacer-memory prints all ways side by side.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/arg.h>

#include <pacer/optimizers/adam_options.h>
#include <pacer/parallel/shards.h>

namespace pacer {

struct TrainingMemoryOptions {
  explicit TrainingMemoryOptions(int64_t parameters) : parameters_(parameters) {}
  // Elements of all trained parameters together, >= 0.
  TORCH_ARG(int64_t, parameters);
  // How many ranks train together, >= 1; with ShardGroup::node, the ranks of one node.
  TORCH_ARG(int, ranks) = 1;
  // The dtype of parameters and gradients: fp64, fp32, bf16 or fp16.
  TORCH_ARG(at::ScalarType, dtype) = at::kFloat;
  // Whether a step has several micro-batches, whose 16-bit gradients add up in fp32, as GradientAccumulation
  // has it.
  TORCH_ARG(bool, accumulates_in_fp32) = false;
  // With GradientRelease: the elements of the largest parameter, whose gradient alone exists at a time, in steps after the
  // first. 0: all gradients exist until the step. On one rank, without accumulates_in_fp32 and without
  // Muon only.
  TORCH_ARG(int64_t, largest_released) = 0;
  // See FusedAdamWOptions. The memory is that of a FusedAdam, FusedAdamW, FusedLamb or Muon with this option.
  TORCH_ARG(MasterWeights, master_weights) = MasterWeights::automatic;
  TORCH_ARG(Rounding, rounding) = Rounding::nearest;
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(int64_t, state_bits) = 32;
  // How many of the elements are in matrices that Muon orthogonalises, which have one moment instead of two; the others
  // take AdamW. Directions are not counted.
  TORCH_ARG(int64_t, orthogonalized) = 0;
  // What each rank has a part of; unset: all of everything, as with DataParallel.
  TORCH_ARG(std::optional<Sharded>, sharded);
  TORCH_ARG(int64_t, unit_bytes) = ShardsOptions().unit_bytes();
  // These three are for Sharded::parameters: the elements of the largest block, >= 1; the elements of what is
  // in no block; and what ShardsOptions has as prefetch.
  TORCH_ARG(int64_t, largest_block) = 0;
  TORCH_ARG(int64_t, outside_blocks) = 0;
  TORCH_ARG(int64_t, prefetch) = ShardsOptions().prefetch();
};

// Bytes of one rank, at the peak of a step. Parts are rounded up to whole elements; what aligns them (128
// elements a parameter, 128 a rank and unit) is not counted, nor what a back-end needs for operations.
struct TrainingMemory {
  int64_t weights = 0;    // all of them, or the part that is this rank's
  int64_t gradients = 0;  // whole ones, and the parts that are this rank's
  int64_t moments = 0;
  int64_t exact = 0;  // master copies or remainders
  int64_t units = 0;  // gradients on their way, and parameters that are there for a while
  int64_t total() const { return weights + gradients + moments + exact + units; }
};

// Throws InvalidArgument for numbers out of range and for a dtype or master weights that FusedAdam refuses.
TrainingMemory training_memory(const TrainingMemoryOptions& options);

}  // namespace pacer
