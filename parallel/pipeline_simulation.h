// What plans of a pipeline would take, without a device: when each pass begins and ends, how long each rank
// stands idle, and how many micro-batches it holds. Messages wait in one queue per sender and direction,
// activations apart from gradients, and are received in the order of their sending; a rank sends without
// waiting for the receiver. Nothing is run here.
//
//   auto simulated = pacer::simulate_pipeline({pacer::PipelineOrder::zero_bubble, 4, 8});
//   std::printf("%.3f of the step idle\n", simulated.idle[0]);
#pragma once

#include <cstdint>
#include <vector>

#include <pacer/parallel/pipeline_plan.h>

namespace pacer {

// Times of a micro-batch through all stages of one rank, in any one unit, finite and >= 0; each of several
// chunks takes its share. A whole backward pass takes both halves.
struct PipelineCosts {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
  double transfer = 0;  // of one message between two ranks; those of one queue go one after the other
};

// When an action ran, from the begin of the step on.
struct PipelineInterval {
  double begin = 0;
  double end = 0;
};

struct PipelineSimulation {
  std::vector<std::vector<PipelineInterval>> intervals;  // [rank][action of its plan]
  double total = 0;                                      // from the first begin to the last end
  std::vector<double> idle;                              // [rank], share of the total without a pass
  std::vector<double> alive;                             // [rank], as pipeline_alive counts
};

// Simulates plans, one a rank, whose actions name chunks below `chunks`. Throws InvalidArgument, naming rank
// and action, for a plan that repeats a pass, runs backward before forward or ends with a micro-batch that
// did not go backward; where messages come in another order than they are received; and where no rank can go
// on.
PipelineSimulation simulate_pipeline(const std::vector<PipelinePlan>& plans, int64_t chunks,
                                     const PipelineCosts& costs = {});

// Simulates pipeline_plans(schedule).
PipelineSimulation simulate_pipeline(const PipelineSchedule& schedule, const PipelineCosts& costs = {});

// Returns the share of a step that each rank stands idle, in closed form. With times F, I, W of forward and
// the two halves of backward, p ranks, m micro-batches and v chunks the idle time is (p - 1)(F + I + W) for
// gpipe and one_f_one_b, 1 / v of that for interleaved, and (p - 1)(F + I) - (min(m, p) - 1) W for
// zero_bubble. Throws InvalidArgument like validate(), for a transfer time, and for zero_bubble where its
// weight half takes longer than forward or than the input half: there is no such formula then, only a
// simulation.
double pipeline_idle(const PipelineSchedule& schedule, const PipelineCosts& costs = {});

}  // namespace pacer
