// Options of a Pipeline.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/arg.h>

#include <pacer/parallel/parallel_training.h>

namespace pacer {

struct PipelineOptions {
  PipelineOptions() = default;
  // Names of modules, parameters and buffers of the model outside the blocks, as named_modules() has them:
  // what the first stage uses before its blocks, and what the last one uses behind them. A name may be in
  // both. All that is in no block must be in one of them.
  TORCH_ARG(std::vector<std::string>, first);
  TORCH_ARG(std::vector<std::string>, last);
  // Stage s has the blocks cut[s] to cut[s + 1] - 1, from 0 to the number of blocks; a stage may be empty.
  // Unset: the same number each, give or take one. balanced_cut() makes one from measured times.
  TORCH_ARG(std::vector<int64_t>, cut);
  // Micro-batches count by their tokens, not alike.
  TORCH_ARG(bool, weight_by_tokens) = false;
  // See GradientAccumulationOptions::accumulate_in_fp32.
  TORCH_ARG(bool, accumulate_in_fp32) = true;
  // See DataParallelOptions; it holds over the replicas of each stage.
  TORCH_ARG(InitialParameters, initial_parameters) = InitialParameters::broadcast;
  TORCH_ARG(bool, sync_buffers) = true;
  TORCH_ARG(bool, unused_is_zero) = false;
};

}  // namespace pacer
