// The queues that messages of a pipeline take: with sends that end when they are received, and messages of a
// queue one after the other, every plan comes to its end.
#include <pacer/parallel/detail/stage_messages.h>

#include <chrono>
#include <deque>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/message_of.h"
#include "support/parallel/pipeline_plans.h"

namespace pacer::testing {
namespace {

using detail::StageMessages;
using Direction = StageMessages::Direction;

struct Operation {
  bool is_sent;
  int peer;
  size_t action;  // of the rank's plan: a send follows it, a receive comes before it
};

// One rank: how far its passes are, and for each way and queue what has to travel, in the order of the calls.
struct Rank {
  PipelinePlan plan;
  size_t done = 0;
  std::deque<Operation> queues[2][3];
  std::vector<int> missing;  // by action: messages that it waits for
};

std::vector<Rank> ranks_of(const PipelineSchedule& schedule) {
  std::vector<Rank> ranks(static_cast<size_t>(schedule.ranks));
  for (int64_t r = 0; r < schedule.ranks; ++r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    rank.plan = pipeline_plan(schedule, r);
    rank.missing.resize(rank.plan.size());
    for (size_t i = 0; i < rank.plan.size(); ++i) {
      const PipelineAction& action = rank.plan[i];
      if (action.pass == PipelinePass::backward_weight) continue;
      const bool is_forward = action.pass == PipelinePass::forward;
      const int64_t stage = schedule.stage(r, action.chunk), step = is_forward ? 1 : -1;
      const Direction direction = is_forward ? Direction::activations : Direction::gradients;
      const auto add = [&](bool is_sent, int64_t other) {
        if (other < 0 || other >= schedule.stages() || other % schedule.ranks == r) return;
        const auto peer = static_cast<int>(other % schedule.ranks);
        const int queue = StageMessages::queue_of(direction, is_sent ? static_cast<int>(r) : peer, schedule);
        REQUIRE(queue < StageMessages::queues(schedule));
        rank.queues[static_cast<size_t>(direction)][queue].push_back({is_sent, peer, i});
        if (!is_sent) ++rank.missing[i];
      };
      add(false, stage - step);
      add(true, stage + step);
    }
  }
  return ranks;
}

// A receive is asked for when the passes before it are done, a send when its own is.
bool is_ready(const Rank& rank, const Operation& operation) {
  return operation.is_sent ? rank.done > operation.action : rank.done >= operation.action;
}

bool ends(const PipelineSchedule& schedule) {
  std::vector<Rank> ranks = ranks_of(schedule);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t r = 0; r < ranks.size(); ++r) {
      Rank& rank = ranks[r];
      while (rank.done < rank.plan.size() && rank.missing[rank.done] == 0) {
        ++rank.done;
        moved = true;
      }
      for (size_t direction = 0; direction < 2; ++direction) {
        for (size_t q = 0; q < 3; ++q) {
          auto& queue = rank.queues[direction][q];
          if (queue.empty() || !queue.front().is_sent || !is_ready(rank, queue.front())) continue;
          Rank& peer = ranks[static_cast<size_t>(queue.front().peer)];
          auto& other = peer.queues[direction][q];
          if (other.empty() || other.front().is_sent || other.front().peer != static_cast<int>(r)) continue;
          if (!is_ready(peer, other.front())) continue;
          --peer.missing[other.front().action];
          other.pop_front();
          queue.pop_front();
          moved = true;
        }
      }
    }
  }
  for (const Rank& rank : ranks) {
    if (rank.done < rank.plan.size()) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("every plan ends over the queues of its messages, though each waits for its receiver",
          "[schedulers][pipeline]") {
  for (const PipelineSchedule& schedule : pipeline_schedules()) {
    INFO(schedule_text(schedule));
    REQUIRE(ends(schedule));
    for (int rank = 0; rank < schedule.ranks && schedule.ranks > 1; ++rank) {
      const auto ranks = static_cast<int>(schedule.ranks);
      for (const Direction direction : {Direction::activations, Direction::gradients}) {
        const int sender =
            (rank + (direction == Direction::activations ? ranks - 1 : 1)) % ranks;  // whom it receives from
        const bool receives =
            schedule.chunks > 1 || (direction == Direction::activations ? rank > 0 : rank + 1 < ranks);
        const bool sends =
            schedule.chunks > 1 || (direction == Direction::activations ? rank + 1 < ranks : rank > 0);
        if (receives && sends) {
          REQUIRE(StageMessages::queue_of(direction, rank, schedule) !=
                  StageMessages::queue_of(direction, sender, schedule));
        }
      }
    }
  }
}

TEST_CASE("a stage sends up to eight tensors of up to eight dimensions, empty ones, too, and no others",
          "[pipeline]") {
  const auto worlds = Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(10)));
  PipelineSchedule schedule;
  schedule.ranks = 2;
  Tensors sent = {torch::randn({2, 1, 1, 2, 1, 1, 1, 3}), torch::empty({0, 3}), torch::tensor(true)};
  sent.push_back(torch::randn({4}).requires_grad_());
  while (sent.size() < 8) sent.push_back(torch::arange(6).view({2, 3}).t());
  const std::vector<Tensors> refused = {{},
                                        Tensors(9, sent[0]),
                                        {sent[0].unsqueeze(0)},
                                        {sent[1], at::Tensor()},
                                        {torch::ones({2}).to_sparse()}};
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            StageMessages stage(worlds[static_cast<size_t>(rank)], schedule);
            if (rank == 1) {
              const Tensors came = stage.take_activations(1, /*kind=*/0);
              require(came.size() == sent.size(), came.size(), " tensors");
              for (size_t i = 0; i < came.size(); ++i) {
                require(came[i].dtype() == sent[i].dtype() && came[i].equal(sent[i]) &&
                            came[i].requires_grad() == sent[i].requires_grad(),
                        "tensor ", i, " is another one");
              }
              return;
            }
            for (size_t i = 0; i < refused.size(); ++i) {
              const std::string message =
                  message_of([&] { stage.send_activations(0, /*kind=*/0, refused[i]); });
              const char* const why = i < 2 ? "tensors to the next; it must be 1 to 8" : "cannot be sent";
              require(message.find(why) != std::string::npos, "number ", i, ": ", message);
            }
            stage.send_activations(0, /*kind=*/0, sent);
            stage.collect(/*wait=*/true);
          })) == "");
}

}  // namespace pacer::testing
