#include "bubble.h"

#include <pacer/parallel/pipeline_simulation.h>

namespace collectives {

std::vector<Bubble> simulate_bubbles(const BubbleSettings& settings) {
  constexpr int64_t kMost = 64;
  std::vector<Bubble> bubbles;
  for (const auto order : {pacer::PipelineOrder::gpipe, pacer::PipelineOrder::one_f_one_b}) {
    bubbles.push_back({pacer::schedule_name(order), {}});
    for (int64_t micro_batches = 1; micro_batches <= kMost; micro_batches *= 2) {
      const pacer::PipelineSchedule schedule{order, settings.stages, micro_batches, 1};
      pacer::PipelineCosts costs;  // forward and each half of backward take 1
      const auto simulated = pacer::simulate_pipeline(schedule, costs);
      const double formula = pacer::pipeline_idle(schedule, costs);
      costs.transfer = settings.message;
      const auto with_messages = pacer::simulate_pipeline(schedule, costs);
      bubbles.back().points.push_back({micro_batches, simulated.idle[0], formula, with_messages.idle[0],
                                       simulated.alive[0], pacer::pipeline_alive(schedule, /*rank=*/0)});
    }
  }
  return bubbles;
}

}  // namespace collectives
