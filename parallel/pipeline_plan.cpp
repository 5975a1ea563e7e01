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

PipelinePlan one_f_one_b_plan(const PipelineShape& shape, int64_t rank) {
  return alternating_plan(
      shape.micro_batches, shape.ranks - rank - 1,
      [](int64_t i) {
        return PipelineAction{PipelinePass::forward, i};
      },
      [](int64_t i) {
        return PipelineAction{PipelinePass::backward, i};
      });
}

// Forward passes before the first backward pass: the first micro-batches must come round to the last chunk,
// and every rank after this one delays the first gradient by two passes.
int64_t interleaved_warm_up(const PipelineShape& shape, int64_t rank) {
  return 2 * (shape.ranks - rank - 1) + (shape.chunks - 1) * shape.ranks;
}

// Micro-batches go in groups of as many as there are ranks: a group through the first chunk, then the same
// group through the next, and backward through the chunks in the other order.
PipelinePlan interleaved_plan(const PipelineShape& shape, int64_t rank) {
  const auto pass = [&shape](PipelinePass kind, int64_t i) {
    const int64_t group = i / shape.stages(), within = i % shape.stages();
    const int64_t chunk = within / shape.ranks;
    return PipelineAction{kind, group * shape.ranks + within % shape.ranks,
                          kind == PipelinePass::forward ? chunk : shape.chunks - 1 - chunk};
  };
  return alternating_plan(
      shape.micro_batches * shape.chunks, interleaved_warm_up(shape, rank),
      [&pass](int64_t i) { return pass(PipelinePass::forward, i); },
      [&pass](int64_t i) { return pass(PipelinePass::backward, i); });
}

// Weight halves lag behind input halves by `rank` micro-batches, which is as long as this rank would stand
// idle, and keeps as many activations on every rank as 1F1B has on its first.
PipelinePlan zero_bubble_plan(const PipelineShape& shape, int64_t rank) {
  PipelinePlan plan;
  int64_t forward = 0, weight = 0;
  const int64_t warm_up = std::min(shape.micro_batches, shape.ranks - rank);
  for (; forward < warm_up; ++forward) plan.push_back({PipelinePass::forward, forward});
  for (int64_t m = 0; m < shape.micro_batches; ++m) {
    plan.push_back({PipelinePass::backward_input, m});
    if (m >= rank) plan.push_back({PipelinePass::backward_weight, weight++});
    if (forward < shape.micro_batches) plan.push_back({PipelinePass::forward, forward++});
  }
  for (; weight < shape.micro_batches; ++weight) plan.push_back({PipelinePass::backward_weight, weight});
  return plan;
}

void require_rank(const PipelineShape& shape, int64_t rank) {
  shape.validate();
  require(rank >= 0 && rank < shape.ranks, "a pipeline of ", shape.ranks, " ranks has the ranks 0 to ",
          shape.ranks - 1, ", not ", rank);
}

}  // namespace

const char* schedule_name(PipelineSchedule schedule) {
  switch (schedule) {
    case PipelineSchedule::gpipe:
      return "gpipe";
    case PipelineSchedule::one_f_one_b:
      return "1f1b";
    case PipelineSchedule::interleaved:
      return "interleaved";
    case PipelineSchedule::zero_bubble:
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

void PipelineShape::validate() const {
  const char* name = schedule_name(schedule);
  require(ranks >= 1 && ranks <= kMostPipelineRanks, "a pipeline has from 1 to ", kMostPipelineRanks,
          " ranks, not ", ranks);
  require(micro_batches >= 1, "a step of a pipeline has at least 1 micro-batch, not ", micro_batches);
  if (schedule == PipelineSchedule::interleaved) {
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

PipelinePlan pipeline_plan(const PipelineShape& shape, int64_t rank) {
  require_rank(shape, rank);
  switch (shape.schedule) {
    case PipelineSchedule::gpipe:
      return gpipe_plan(shape.micro_batches);
    case PipelineSchedule::one_f_one_b:
      return one_f_one_b_plan(shape, rank);
    case PipelineSchedule::interleaved:
      return interleaved_plan(shape, rank);
    case PipelineSchedule::zero_bubble:
      return zero_bubble_plan(shape, rank);
  }
  return {};
}

std::vector<PipelinePlan> pipeline_plans(const PipelineShape& shape) {
  shape.validate();
  std::vector<PipelinePlan> plans;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) plans.push_back(pipeline_plan(shape, rank));
  return plans;
}

double pipeline_alive(const PipelineShape& shape, int64_t rank) {
  require_rank(shape, rank);
  switch (shape.schedule) {
    case PipelineSchedule::gpipe:
      return static_cast<double>(shape.micro_batches);
    case PipelineSchedule::one_f_one_b:
      return static_cast<double>(std::min(shape.micro_batches, shape.ranks - rank));
    case PipelineSchedule::interleaved:
      return static_cast<double>(
                 std::min(shape.micro_batches * shape.chunks, interleaved_warm_up(shape, rank) + 1)) /
             static_cast<double>(shape.chunks);
    case PipelineSchedule::zero_bubble:
      return static_cast<double>(std::min(shape.micro_batches, shape.ranks));
  }
  return 0;
}

}  // namespace pacer
