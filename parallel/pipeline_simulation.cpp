#include <pacer/parallel/pipeline_simulation.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <pacer/core/error.h>

namespace pacer {
namespace {

enum class PipelineDirection { activations, gradients };

struct PipelineMessage {
  int64_t micro_batch;
  int64_t stage;  // that sends it
  double arrival;
};

// The messages of one sender in one direction; as stages are dealt out in turn, they have one receiver.
struct PipelineQueue {
  std::deque<PipelineMessage> messages;
  double free_from = 0;
};

std::string place_in_plan(int64_t rank, size_t index, const PipelineAction& action) {
  return detail::concatenate("rank ", rank, " at its action ", index, ", ", describe(action));
}

// How far a rank has come with a micro-batch in a chunk.
enum class PipelineStanding { ahead, held, half, done };

// Checks what can be seen in the plan of one rank alone. Returns the most chunks of micro-batches held at
// once.
int64_t most_held(const PipelinePlan& plan, int64_t rank, int64_t chunks) {
  std::map<std::pair<int64_t, int64_t>, PipelineStanding> standings;
  int64_t held = 0, most = 0;
  for (size_t i = 0; i < plan.size(); ++i) {
    const PipelineAction& action = plan[i];
    require(action.micro_batch >= 0 && action.chunk >= 0 && action.chunk < chunks,
            "the pipeline plan names what there is not, ", place_in_plan(rank, i, action),
            "; micro-batches count from 0, and chunks from 0 to ", chunks - 1);
    PipelineStanding& standing = standings[{action.micro_batch, action.chunk}];
    const bool is_forward = action.pass == PipelinePass::forward;
    const bool is_weight = action.pass == PipelinePass::backward_weight;
    const PipelineStanding wanted = is_forward  ? PipelineStanding::ahead
                                    : is_weight ? PipelineStanding::half
                                                : PipelineStanding::held;
    require(standing == wanted, "the pipeline plan has ", place_in_plan(rank, i, action),
            standing > wanted ? ", a second time" : ", before the pass that it needs",
            "; a micro-batch goes through each chunk forward, then backward, once");
    const bool is_last = is_weight || action.pass == PipelinePass::backward;
    standing = is_forward ? PipelineStanding::held
               : is_last  ? PipelineStanding::done
                          : PipelineStanding::half;
    held += is_forward ? 1 : is_last ? -1 : 0;
    most = std::max(most, held);
  }
  for (const auto& [key, standing] : standings) {
    require(standing == PipelineStanding::done, "the pipeline plan of rank ", rank,
            " ends before micro-batch ", key.first, " went all the way backward through chunk ", key.second);
  }
  return most;
}

// The clocks of all ranks, and what is under way between them.
class PipelineClockwork {
 public:
  PipelineClockwork(const std::vector<PipelinePlan>& plans, int64_t chunks, const PipelineCosts& costs)
      : plans_(plans),
        ranks_(static_cast<int64_t>(plans.size())),
        stages_(ranks_ * chunks),
        chunks_(static_cast<double>(chunks)),
        costs_(costs),
        now_(plans.size()),
        next_(plans.size()),
        queues_{std::vector<PipelineQueue>(plans.size()), std::vector<PipelineQueue>(plans.size())},
        intervals_(plans.size()) {}

  std::vector<std::vector<PipelineInterval>> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int64_t rank = 0; rank < ranks_; ++rank) {
        while (next_[at(rank)] < plans_[at(rank)].size() && advance(rank)) moved = true;
      }
    }
    for (int64_t rank = 0; rank < ranks_; ++rank) refuse_standstill(rank);
    return std::move(intervals_);
  }

 private:
  static size_t at(int64_t rank) { return static_cast<size_t>(rank); }

  const PipelineAction& action_of(int64_t rank) const { return plans_[at(rank)][next_[at(rank)]]; }
  int64_t stage_of(int64_t rank) const { return action_of(rank).chunk * ranks_ + rank; }

  static PipelineDirection direction_of(const PipelineAction& action) {
    return action.pass == PipelinePass::forward ? PipelineDirection::activations
                                                : PipelineDirection::gradients;
  }

  PipelineQueue& queue(PipelineDirection direction, int64_t sender) {
    return queues_[direction == PipelineDirection::activations ? 0 : 1][at(sender)];
  }

  // Returns the stage whose message the rank's next action needs, if it needs one from another rank.
  std::optional<int64_t> awaited_stage(int64_t rank) const {
    const PipelineAction& action = action_of(rank);
    if (ranks_ == 1 || action.pass == PipelinePass::backward_weight) return std::nullopt;
    const int64_t from = stage_of(rank) + (action.pass == PipelinePass::forward ? -1 : 1);
    return from >= 0 && from < stages_ ? std::optional<int64_t>(from) : std::nullopt;
  }

  double cost_of(const PipelineAction& action) const {
    switch (action.pass) {
      case PipelinePass::forward:
        return costs_.forward / chunks_;
      case PipelinePass::backward:
        return (costs_.backward_input + costs_.backward_weight) / chunks_;
      case PipelinePass::backward_input:
        return costs_.backward_input / chunks_;
      case PipelinePass::backward_weight:
        return costs_.backward_weight / chunks_;
    }
    return 0;
  }

  // Does the rank's next action if what it needs has been sent.
  bool advance(int64_t rank) {
    const PipelineAction& action = action_of(rank);
    double begin = now_[at(rank)];
    if (const auto from = awaited_stage(rank)) {
      const int64_t sender = *from % ranks_;
      auto& messages = queue(direction_of(action), sender).messages;
      if (messages.empty()) return false;
      const PipelineMessage message = messages.front();
      require(message.micro_batch == action.micro_batch && message.stage == *from,
              "the pipeline plans of ranks ", sender, " and ", rank,
              " send and receive in different orders, ", place_in_plan(rank, next_[at(rank)], action),
              ": what comes first is micro-batch ", message.micro_batch, " of chunk ",
              message.stage / ranks_);
      messages.pop_front();
      begin = std::max(begin, message.arrival);
    }
    const double end = begin + cost_of(action);
    send(rank, end);
    now_[at(rank)] = end;
    intervals_[at(rank)].push_back({begin, end});
    ++next_[at(rank)];
    return true;
  }

  void send(int64_t rank, double end) {
    const PipelineAction& action = action_of(rank);
    if (ranks_ == 1 || action.pass == PipelinePass::backward_weight) return;
    const int64_t stage = stage_of(rank);
    const int64_t to = stage + (action.pass == PipelinePass::forward ? 1 : -1);
    if (to < 0 || to >= stages_) return;
    PipelineQueue& way = queue(direction_of(action), rank);
    way.free_from = std::max(way.free_from, end) + costs_.transfer;
    way.messages.push_back({action.micro_batch, stage, way.free_from});
  }

  void refuse_standstill(int64_t rank) const {
    if (next_[at(rank)] == plans_[at(rank)].size()) return;
    const PipelineAction& action = action_of(rank);
    const int64_t sender = *awaited_stage(rank) % ranks_;
    const bool has_ended = next_[at(sender)] == plans_[at(sender)].size();
    throw InvalidArgument(detail::concatenate(
        "the pipeline plans cannot go on, ", place_in_plan(rank, next_[at(rank)], action), ": it waits for ",
        action.pass == PipelinePass::forward ? "activations" : "gradients", " of rank ", sender, ", which ",
        has_ended ? "has ended" : "stands at " + describe(action_of(sender))));
  }

  const std::vector<PipelinePlan>& plans_;
  const int64_t ranks_, stages_;
  const double chunks_;
  const PipelineCosts costs_;
  std::vector<double> now_;
  std::vector<size_t> next_;
  std::vector<PipelineQueue> queues_[2];  // by direction, then by sender
  std::vector<std::vector<PipelineInterval>> intervals_;
};

void require_costs(const PipelineCosts& costs) {
  for (const double cost : {costs.forward, costs.backward_input, costs.backward_weight, costs.transfer}) {
    require(std::isfinite(cost) && cost >= 0,
            "the times of a pipeline's passes are finite and not negative, not ", cost);
  }
}

}  // namespace

PipelineSimulation simulate_pipeline(const std::vector<PipelinePlan>& plans, int64_t chunks,
                                     const PipelineCosts& costs) {
  require(!plans.empty(), "a pipeline has at least one rank, but there is no plan");
  require(chunks >= 1, "a rank of a pipeline has at least one chunk, not ", chunks);
  require_costs(costs);
  PipelineSimulation simulated;
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    simulated.alive.push_back(
        static_cast<double>(most_held(plans[rank], static_cast<int64_t>(rank), chunks)) /
        static_cast<double>(chunks));
  }
  simulated.intervals = PipelineClockwork(plans, chunks, costs).run();
  for (const auto& intervals : simulated.intervals) {
    if (!intervals.empty()) simulated.total = std::max(simulated.total, intervals.back().end);
  }
  for (const auto& intervals : simulated.intervals) {
    double busy = 0;
    for (const PipelineInterval& interval : intervals) busy += interval.end - interval.begin;
    simulated.idle.push_back(simulated.total > 0 ? 1 - busy / simulated.total : 0);
  }
  return simulated;
}

PipelineSimulation simulate_pipeline(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  return simulate_pipeline(pipeline_plans(schedule), schedule.chunks, costs);
}

double pipeline_idle(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  schedule.validate();
  require_costs(costs);
  require(costs.transfer == 0, "pipeline_idle counts no transfer times, but got ", costs.transfer,
          "; simulate_pipeline does");
  const double others = static_cast<double>(schedule.ranks - 1);
  const double both_halves = costs.backward_input + costs.backward_weight;
  double idle = others * (costs.forward + both_halves) / static_cast<double>(schedule.chunks);
  if (schedule.order == PipelineOrder::zero_bubble) {
    require(
        costs.backward_weight <= std::min(costs.forward, costs.backward_input),
        "pipeline_idle of zero_bubble needs a weight half that takes no longer than forward and the input "
        "half, but it takes ",
        costs.backward_weight, "; simulate_pipeline takes any");
    const double filled = static_cast<double>(std::min(schedule.micro_batches, schedule.ranks) - 1);
    idle = others * (costs.forward + costs.backward_input) - filled * costs.backward_weight;
  }
  const double busy = static_cast<double>(schedule.micro_batches) * (costs.forward + both_halves);
  return busy + idle > 0 ? idle / (busy + idle) : 0;
}

}  // namespace pacer
