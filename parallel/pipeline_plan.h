// Pipeline parallelism as a pure function: how many ranks, micro-batches and chunks there are, and which rank
// asks, in; the order of that rank's passes out. It holds no state and knows neither tensors nor devices, so
// that a plan can be printed, simulated (pipeline_simulation.h) and tested anywhere. pipeline.h runs it.
//
//   auto plan = pacer::pipeline_plan({pacer::PipelineOrder::one_f_one_b, 4, 8}, /*rank=*/1);
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pacer {

// The order of passes on the ranks of a pipeline.
enum class PipelineOrder {
  gpipe,        // all forward passes, then all backward passes (Huang et al., arXiv:1811.06965)
  one_f_one_b,  // forward and backward in turn after a warm-up (PipeDream-Flush; arXiv:2104.04473, 2.2.1)
  interleaved,  // the same over several chunks a rank (Narayanan et al., arXiv:2104.04473, 2.2.2)
  zero_bubble,  // weight gradients fill the gaps (ZB-H1 of Qi et al., arXiv:2401.10241)
};

// "gpipe", "1f1b", "interleaved" or "zero-bubble". Throws InvalidArgument for any other value.
const char* schedule_name(PipelineOrder order);

// What a rank does with one micro-batch in one of its stages.
enum class PipelinePass {
  forward,
  backward,         // both halves at once
  backward_input,   // the gradient of the stage's input, which the stage before waits for
  backward_weight,  // the gradients of its parameters, which nobody waits for
};

// One pass of one micro-batch through one of the rank's stages.
struct PipelineAction {
  PipelinePass pass = PipelinePass::forward;
  int64_t micro_batch = 0;  // from 0
  int64_t chunk = 0;        // from 0; the stage is chunk * ranks + rank

  bool operator==(const PipelineAction& other) const {
    return pass == other.pass && micro_batch == other.micro_batch && chunk == other.chunk;
  }
  bool operator!=(const PipelineAction& other) const { return !(*this == other); }
};

// Returns "forward of micro-batch 3, chunk 1", for messages.
std::string describe(const PipelineAction& action);

// The passes of one rank in their order.
using PipelinePlan = std::vector<PipelineAction>;

// Says in which order passes come, and over how many ranks and chunks. The model is cut into ranks * chunks
// stages in a row; rank r has the stages r, ranks + r, 2 * ranks + r ...
struct PipelineSchedule {
  PipelineOrder order = PipelineOrder::one_f_one_b;
  int64_t ranks = 1;          // >= 1
  int64_t micro_batches = 1;  // of one step, >= 1; interleaved: a multiple of ranks
  int64_t chunks = 1;         // stages of each rank: >= 2 where interleaved, else 1

  int64_t stages() const { return ranks * chunks; }
  // The stage that is chunk number `chunk` of the rank.
  int64_t stage(int64_t rank, int64_t chunk) const { return chunk * ranks + rank; }

  // Throws InvalidArgument where the numbers are out of range, or there is no such schedule. Ranks are at most
  // 2^20, micro-batches times chunks at most 2^24.
  void validate() const;
};

// Schedules for a Pipeline, which sets the number of ranks.
inline PipelineSchedule gpipe(int64_t micro_batches) { return {PipelineOrder::gpipe, 1, micro_batches, 1}; }
inline PipelineSchedule one_f_one_b(int64_t micro_batches) {
  return {PipelineOrder::one_f_one_b, 1, micro_batches, 1};
}
inline PipelineSchedule interleaved(int64_t micro_batches, int64_t chunks) {
  return {PipelineOrder::interleaved, 1, micro_batches, chunks};
}
inline PipelineSchedule zero_bubble(int64_t micro_batches) {
  return {PipelineOrder::zero_bubble, 1, micro_batches, 1};
}

// Returns what this rank does in one step. Every stage does every micro-batch once forward and once backward,
// or once each half of backward. Throws InvalidArgument like validate(), and for a rank out of range.
PipelinePlan pipeline_plan(const PipelineSchedule& schedule, int64_t rank);

// Returns the plans of all ranks.
std::vector<PipelinePlan> pipeline_plans(const PipelineSchedule& schedule);

// Returns the most micro-batches whose activations the rank holds at once, in closed form; a chunk's count as
// 1 / chunks. They are held from the forward pass to the end of the last backward half. Throws
// InvalidArgument like pipeline_plan.
double pipeline_alive(const PipelineSchedule& schedule, int64_t rank);

}  // namespace pacer
