#include <pacer/parallel/pipeline_plan.h>

#include <algorithm>

#include <pacer/core/error.h>

namespace pacer {
namespace {

constexpr int64_t kMostPipelineRanks = int64_t{1} << 20;
constexpr int64_t kMostPipelinePasses = int64_t{1} << 24;

PipelinePlan gpipe_plan(int64_t micro_batches) {
  PipelinePlan plan;
  for (int64_t m = 0; m < micro_batches; ++m) plan.push_back({PipelinePass::forward, m});
  for (int64_t m = 0; m < micro_batches; ++m) plan.push_back({PipelinePass::backward, m});
  return plan;
}

// The forward and backward passes of an order each, `warm_up` forward passes first, then in turn.
template <class Forward, class Backward>
PipelinePlan alternating_plan(int64_t passes, int64_t warm_up, Forward forward, Backward backward) {
  PipelinePlan plan;
  warm_up = std::min(passes, warm_up);
  for (int64_t i = 0; i < warm_up; ++i) plan.push_back(forward(i));
  for (int64_t i = 0; i < passes; ++i) {
    if (warm_up + i < passes) plan.push_back(forward(warm_up + i));
    plan.push_back(backward(i));
  }
  return plan;
}

PipelinePlan one_f_one_b_plan(const PipelineSchedule& schedule, int64_t rank) {
  return alternating_plan(
      schedule.micro_batches, schedule.ranks - rank - 1,
      [](int64_t i) {
        return PipelineAction{PipelinePass::forward, i};
      },
      [](int64_t i) {
        return PipelineAction{PipelinePass::backward, i};
      });
}

// Forward passes before the first backward pass: the first micro-batches must come round to the last chunk,
// and every rank after this one delays the first gradient by two passes.
int64_t interleaved_warm_up(const PipelineSchedule& schedule, int64_t rank) {
  return 2 * (schedule.ranks - rank - 1) + (schedule.chunks - 1) * schedule.ranks;
}

// Micro-batches go in groups of as many as there are ranks: a group through the first chunk, then the same
// group through the next, and backward through the chunks in the other order.
PipelinePlan interleaved_plan(const PipelineSchedule& schedule, int64_t rank) {
  const auto pass = [&schedule](PipelinePass kind, int64_t i) {
    const int64_t group = i / schedule.stages(), within = i % schedule.stages();
    const int64_t chunk = within / schedule.ranks;
    return PipelineAction{kind, group * schedule.ranks + within % schedule.ranks,
                          kind == PipelinePass::forward ? chunk : schedule.chunks - 1 - chunk};
  };
  return alternating_plan(
      schedule.micro_batches * schedule.chunks, interleaved_warm_up(schedule, rank),
      [&pass](int64_t i) { return pass(PipelinePass::forward, i); },
      [&pass](int64_t i) { return pass(PipelinePass::backward, i); });
}

// Weight halves lag behind input halves by `rank` micro-batches, which is as long as this rank would stand
// idle, and keeps as many activations on every rank as 1F1B has on its first.
PipelinePlan zero_bubble_plan(const PipelineSchedule& schedule, int64_t rank) {
  PipelinePlan plan;
  int64_t forward = 0, weight = 0;
  const int64_t warm_up = std::min(schedule.micro_batches, schedule.ranks - rank);
  for (; forward < warm_up; ++forward) plan.push_back({PipelinePass::forward, forward});
  for (int64_t m = 0; m < schedule.micro_batches; ++m) {
    plan.push_back({PipelinePass::backward_input, m});
    if (m >= rank) plan.push_back({PipelinePass::backward_weight, weight++});
    if (forward < schedule.micro_batches) plan.push_back({PipelinePass::forward, forward++});
  }
  for (; weight < schedule.micro_batches; ++weight) plan.push_back({PipelinePass::backward_weight, weight});
  return plan;
}

void require_rank(const PipelineSchedule& schedule, int64_t rank) {
  schedule.validate();
  require(rank >= 0 && rank < schedule.ranks, "a pipeline of ", schedule.ranks, " ranks has the ranks 0 to ",
          schedule.ranks - 1, ", not ", rank);
}

}  // namespace

const char* schedule_name(PipelineOrder order) {
  switch (order) {
    case PipelineOrder::gpipe:
      return "gpipe";
    case PipelineOrder::one_f_one_b:
      return "1f1b";
    case PipelineOrder::interleaved:
      return "interleaved";
    case PipelineOrder::zero_bubble:
      return "zero-bubble";
  }
  throw InvalidArgument("a pipeline schedule is none of gpipe, one_f_one_b, interleaved and zero_bubble");
}

std::string describe(const PipelineAction& action) {
  const char* pass = action.pass == PipelinePass::forward          ? "forward"
                     : action.pass == PipelinePass::backward       ? "backward"
                     : action.pass == PipelinePass::backward_input ? "input half of backward"
                                                                   : "weight half of backward";
  return detail::concatenate(pass, " of micro-batch ", action.micro_batch, ", chunk ", action.chunk);
}

void PipelineSchedule::validate() const {
  const char* name = schedule_name(order);
  require(ranks >= 1 && ranks <= kMostPipelineRanks, "a pipeline has from 1 to ", kMostPipelineRanks,
          " ranks, not ", ranks);
  require(micro_batches >= 1, "a step of a pipeline has at least 1 micro-batch, not ", micro_batches);
  if (order == PipelineOrder::interleaved) {
    require(chunks >= 2, "an interleaved pipeline has 2 or more chunks a rank, not ", chunks,
            "; with one chunk take one_f_one_b");
    require(micro_batches % ranks == 0, "the micro-batches of an interleaved pipeline are a multiple of its ",
            ranks, " ranks, but ", micro_batches, " is none; take ", (micro_batches / ranks + 1) * ranks);
  } else {
    require(chunks == 1, "a rank of a ", name, " pipeline has one chunk, not ", chunks,
            "; several chunks need interleaved");
  }
  require(micro_batches <= kMostPipelinePasses / chunks, "a pipeline plan has at most ", kMostPipelinePasses,
          " micro-batches times chunks, not ", micro_batches, " times ", chunks);
}

PipelinePlan pipeline_plan(const PipelineSchedule& schedule, int64_t rank) {
  require_rank(schedule, rank);
  switch (schedule.order) {
    case PipelineOrder::gpipe:
      return gpipe_plan(schedule.micro_batches);
    case PipelineOrder::one_f_one_b:
      return one_f_one_b_plan(schedule, rank);
    case PipelineOrder::interleaved:
      return interleaved_plan(schedule, rank);
    case PipelineOrder::zero_bubble:
      return zero_bubble_plan(schedule, rank);
  }
  return {};
}

std::vector<PipelinePlan> pipeline_plans(const PipelineSchedule& schedule) {
  schedule.validate();
  std::vector<PipelinePlan> plans;
  for (int64_t rank = 0; rank < schedule.ranks; ++rank) plans.push_back(pipeline_plan(schedule, rank));
  return plans;
}

double pipeline_alive(const PipelineSchedule& schedule, int64_t rank) {
  require_rank(schedule, rank);
  switch (schedule.order) {
    case PipelineOrder::gpipe:
      return static_cast<double>(schedule.micro_batches);
    case PipelineOrder::one_f_one_b:
      return static_cast<double>(std::min(schedule.micro_batches, schedule.ranks - rank));
    case PipelineOrder::interleaved:
      return static_cast<double>(std::min(schedule.micro_batches * schedule.chunks,
                                          interleaved_warm_up(schedule, rank) + 1)) /
             static_cast<double>(schedule.chunks);
    case PipelineOrder::zero_bubble:
      return static_cast<double>(std::min(schedule.micro_batches, schedule.ranks));
  }
  return 0;
}

}  // namespace pacer
