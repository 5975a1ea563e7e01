// A few steps of one schedule on this rank, and what they took.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <pacer/collectives/grid.h>
#include <pacer/parallel/pipeline_plan.h>

#include "support/gpt.h"

namespace bench::pipeline {

struct Shape {
  GptShape gpt;
  int64_t micro_batches = 8, rows = 4;  // rows of a micro-batch

  int64_t tokens() const { return micro_batches * rows * gpt.length; }  // of a step
};

// What this rank measured. Times are in milliseconds.
struct Measured {
  std::vector<double> steps;      // those that count, by the host's clock, from a barrier to an idle device
  std::vector<double> passes;     // of these, forward and backward in the order of the plan, with messages
  std::vector<double> optimizer;  // the rest of these steps
  std::vector<double> own;        // the passes of this rank's stages alone, without messages
  int64_t blocks = 0, parameters = 0;             // of this rank
  double allocated_GB = 0, reserved_GB = 0;       // peaks since the stages are on their devices; 0 on a CPU
  std::vector<double> first_losses, last_losses;  // of the first step and the last, one for each call
};

// Rank r has the blocks cut[r] ... cut[r + 1] - 1, where `cut` is not empty; else ranks have the same number.
struct Cut {
  std::vector<int64_t> ranks;

  // The bounds of stages: a rank's blocks are shared out over its chunks, and earlier ones have more. Empty
  // where the cut is. Throws InvalidArgument for another number of ranks.
  std::vector<int64_t> stages(const pacer::PipelineSchedule& schedule) const;
};

// Trains the model of seed 0 anew for `uncounted` + `steps` steps, and adds to `measured`. All ranks of the
// grid together; `schedule` says how many they are. Everything is gone when this returns.
void measure(const Shape& shape, const pacer::PipelineSchedule& schedule, const Cut& cut,
             const pacer::Grid& grid, int64_t uncounted, int64_t steps, Measured& measured);

}  // namespace bench::pipeline
