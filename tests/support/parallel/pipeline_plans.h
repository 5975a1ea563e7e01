// Plans of a pipeline as short text, and the table of shapes that tests go through.
#pragma once

#include <string>
#include <vector>

#include <pacer/parallel/pipeline_plan.h>

namespace pacer::testing {

// "F0 F1 I0 W0": forward, both halves of backward (B), the input and the weight half; with several chunks a
// letter says which: "F0a F0b".
inline std::string plan_text(const PipelinePlan& plan, int64_t chunks) {
  std::string text;
  for (const PipelineAction& action : plan) {
    if (!text.empty()) text += ' ';
    text += "FBIW"[static_cast<int>(action.pass)] + std::to_string(action.micro_batch);
    if (chunks > 1) text += static_cast<char>('a' + action.chunk);
  }
  return text;
}

// The other way round; chunks by their letters, 0 without one.
inline PipelinePlan plan_of(const std::string& text) {
  PipelinePlan plan;
  for (const char letter : text) {
    if (letter == ' ') continue;
    if (letter >= '0' && letter <= '9') {
      plan.back().micro_batch = plan.back().micro_batch * 10 + (letter - '0');
    } else if (letter >= 'a') {
      plan.back().chunk = letter - 'a';
    } else {
      plan.push_back({static_cast<PipelinePass>(std::string("FBIW").find(letter))});
    }
  }
  return plan;
}

// Every schedule for 1 to 8 ranks and 1 to 20 micro-batches, also fewer than ranks; interleaved with 2 to 4
// chunks, where the micro-batches are a multiple of the ranks.
inline std::vector<PipelineSchedule> pipeline_schedules() {
  std::vector<PipelineSchedule> schedules;
  for (int64_t ranks = 1; ranks <= 8; ++ranks) {
    for (int64_t micro_batches = 1; micro_batches <= 20; ++micro_batches) {
      for (const auto schedule :
           {PipelineOrder::gpipe, PipelineOrder::one_f_one_b, PipelineOrder::zero_bubble}) {
        schedules.push_back({schedule, ranks, micro_batches});
      }
      for (int64_t chunks = 2; chunks <= 4 && micro_batches % ranks == 0; ++chunks) {
        schedules.push_back({PipelineOrder::interleaved, ranks, micro_batches, chunks});
      }
    }
  }
  return schedules;
}

inline std::string schedule_text(const PipelineSchedule& schedule) {
  return std::string(schedule_name(schedule.order)) + ", " + std::to_string(schedule.ranks) + " ranks, " +
         std::to_string(schedule.micro_batches) + " micro-batches, " + std::to_string(schedule.chunks) +
         " chunks";
}

}  // namespace pacer::testing
