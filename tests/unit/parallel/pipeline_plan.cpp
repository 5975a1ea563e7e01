// The plans of pipelines: against plans written out by hand, and for what must hold in every plan.
#include <set>
#include <tuple>

#include <pacer/core/error.h>
#include <pacer/parallel/pipeline_plan.h>

#include "support/catch.h"
#include "support/parallel/pipeline_plans.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

std::vector<std::string> plan_texts(const PipelineSchedule& schedule) {
  std::vector<std::string> texts;
  for (const PipelinePlan& plan : pipeline_plans(schedule)) texts.push_back(plan_text(plan, schedule.chunks));
  return texts;
}

}  // namespace

TEST_CASE("plans of pipelines are those written out by hand", "[schedulers][pipeline]") {
  struct Known {
    PipelineSchedule schedule;
    std::vector<std::string> plans;
  };
  const auto known = std::vector<Known>{
      {{PipelineOrder::gpipe, 2, 3}, {"F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"}},
      {{PipelineOrder::one_f_one_b, 1, 2}, {"F0 B0 F1 B1"}},
      {{PipelineOrder::one_f_one_b, 3, 4},
       {"F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"}},
      // Figure 4 of arXiv:2104.04473, which counts from 1.
      {{PipelineOrder::one_f_one_b, 4, 8},
       {"F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7", "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"}},
      {{PipelineOrder::one_f_one_b, 4, 2}, {"F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"}},
      {{PipelineOrder::interleaved, 2, 4, 2},
       {"F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a",
        "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"}},
      {{PipelineOrder::interleaved, 3, 3, 2},
       {"F0a F1a F2a F0b F1b F2b B0b B1b B2b B0a B1a B2a", "F0a F1a F2a F0b F1b F2b B0b B1b B2b B0a B1a B2a",
        "F0a F1a F2a F0b B0b F1b B1b F2b B2b B0a B1a B2a"}},
      {{PipelineOrder::zero_bubble, 2, 3}, {"F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"}},
      {{PipelineOrder::zero_bubble, 3, 4},
       {"F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"}},
      {{PipelineOrder::zero_bubble, 4, 1}, {"F0 I0 W0", "F0 I0 W0", "F0 I0 W0", "F0 I0 W0"}},
  };
  for (const auto& [schedule, plans] : known) {
    INFO(schedule_text(schedule));
    CHECK(plan_texts(schedule) == plans);
  }
}

TEST_CASE("every stage does every pass of every micro-batch once, forward first", "[schedulers][pipeline]") {
  const auto schedules = pipeline_schedules();
  REQUIRE(schedules.size() > 600);
  for (const PipelineSchedule& schedule : schedules) {
    INFO(schedule_text(schedule));
    const bool is_split = schedule.order == PipelineOrder::zero_bubble;
    std::set<int64_t> stages;
    for (int64_t rank = 0; rank < schedule.ranks; ++rank) {
      const PipelinePlan plan = pipeline_plan(schedule, rank);
      REQUIRE((plan == pipeline_plan(schedule, rank)));
      std::set<std::tuple<PipelinePass, int64_t, int64_t>> seen;
      const auto has = [&seen](PipelinePass pass, const PipelineAction& action) {
        return seen.count({pass, action.micro_batch, action.chunk}) == 1;
      };
      bool is_ordered = true, is_in_range = true;
      for (const PipelineAction& action : plan) {
        if (action.pass == PipelinePass::backward_weight) {
          is_ordered = is_ordered && has(PipelinePass::backward_input, action);
        } else if (action.pass != PipelinePass::forward) {
          is_ordered = is_ordered && has(PipelinePass::forward, action);
        }
        is_in_range =
            is_in_range && action.micro_batch >= 0 && action.micro_batch < schedule.micro_batches &&
            action.chunk >= 0 && action.chunk < schedule.chunks &&
            (action.pass == PipelinePass::forward || (action.pass == PipelinePass::backward) != is_split);
        seen.insert({action.pass, action.micro_batch, action.chunk});
        stages.insert(schedule.stage(rank, action.chunk));
      }
      REQUIRE(is_ordered);
      REQUIRE(is_in_range);
      REQUIRE(seen.size() == plan.size());
      REQUIRE(plan.size() ==
              static_cast<size_t>(schedule.micro_batches * schedule.chunks * (is_split ? 3 : 2)));
    }
    REQUIRE(stages.size() == static_cast<size_t>(schedule.stages()));
    REQUIRE((*stages.begin() == 0 && *stages.rbegin() == schedule.stages() - 1));
  }
}

TEST_CASE("every rank takes micro-batches in the order in which its neighbours send them",
          "[schedulers][pipeline]") {
  for (const PipelineSchedule& schedule : pipeline_schedules()) {
    INFO(schedule_text(schedule));
    const auto plans = pipeline_plans(schedule);
    // Boundaries in their order that `rank` crosses: the lower stage of each, with the micro-batch.
    // Activations and gradients have a queue each.
    const auto crossings = [&](int64_t rank, bool is_forward, bool is_sent) {
      std::vector<std::pair<int64_t, int64_t>> found;
      for (const PipelineAction& action : plans[static_cast<size_t>(rank)]) {
        if (action.pass == PipelinePass::backward_weight) continue;
        if ((action.pass == PipelinePass::forward) != is_forward) continue;
        const int64_t stage = schedule.stage(rank, action.chunk);
        const int64_t lower = is_forward == is_sent ? stage : stage - 1;
        if (lower >= 0 && lower + 1 < schedule.stages()) found.emplace_back(lower, action.micro_batch);
      }
      return found;
    };
    for (int64_t rank = 0; rank < schedule.ranks; ++rank) {
      const int64_t next = (rank + 1) % schedule.ranks;
      REQUIRE((crossings(rank, true, true) == crossings(next, true, false)));
      REQUIRE((crossings(next, false, true) == crossings(rank, false, false)));
    }
  }
}

TEST_CASE("a pipeline that cannot be is refused in one sentence", "[schedulers][pipeline]") {
  struct Refused {
    PipelineSchedule schedule;
    const char* part;
  };
  const auto refused = std::vector<Refused>{
      {{PipelineOrder::gpipe, 0, 4}, "has from 1 to 1048576 ranks, not 0"},
      {{PipelineOrder::one_f_one_b, -2, 4}, "ranks, not -2"},
      {{PipelineOrder::one_f_one_b, (1 << 20) + 1, 4}, "ranks, not 1048577"},
      {{PipelineOrder::one_f_one_b, 4, 0}, "at least 1 micro-batch, not 0"},
      {{PipelineOrder::zero_bubble, 4, -1}, "at least 1 micro-batch, not -1"},
      {{PipelineOrder::gpipe, 4, 4, 2}, "a gpipe pipeline has one chunk, not 2"},
      {{PipelineOrder::zero_bubble, 4, 4, 0}, "a zero-bubble pipeline has one chunk, not 0"},
      {{PipelineOrder::interleaved, 4, 4, 1}, "take one_f_one_b"},
      {{PipelineOrder::interleaved, 4, 6, 2}, "but 6 is none; take 8"},
      {{PipelineOrder::interleaved, 4, 2, 2}, "but 2 is none; take 4"},
      {{PipelineOrder::one_f_one_b, 4, (1 << 24) + 1}, "at most 16777216"},
      {{PipelineOrder::interleaved, 2, 1 << 24, 2}, "at most 16777216"},
      {{static_cast<PipelineOrder>(7), 4, 4}, "a pipeline schedule is none of"},
  };
  for (const auto& [schedule, part] : refused) {
    CHECK_THROWS_WITH(schedule.validate(), ContainsSubstring(part));
    CHECK_THROWS_AS(pipeline_plan(schedule, 0), InvalidArgument);
    CHECK_THROWS_AS(pipeline_plans(schedule), InvalidArgument);
    CHECK_THROWS_AS(pipeline_alive(schedule, 0), InvalidArgument);
  }
  PipelineSchedule{PipelineOrder::one_f_one_b, 1 << 20, 4}.validate();  // the most ranks
  const PipelineSchedule fine{PipelineOrder::one_f_one_b, 4, 8};
  CHECK_THROWS_WITH(pipeline_plan(fine, 4), ContainsSubstring("has the ranks 0 to 3, not 4"));
  CHECK_THROWS_AS(pipeline_plan(fine, -1), InvalidArgument);
  CHECK_THROWS_AS(pipeline_alive(fine, 4), InvalidArgument);
}

TEST_CASE("actions are compared and described", "[schedulers][pipeline]") {
  CHECK(describe({PipelinePass::forward, 3, 1}) == "forward of micro-batch 3, chunk 1");
  CHECK(describe({PipelinePass::backward, 0, 0}) == "backward of micro-batch 0, chunk 0");
  CHECK(describe({PipelinePass::backward_input, 2, 0}) == "input half of backward of micro-batch 2, chunk 0");
  CHECK(describe({PipelinePass::backward_weight, 2, 0}) ==
        "weight half of backward of micro-batch 2, chunk 0");
  const PipelineAction action{PipelinePass::forward, 3, 1};
  CHECK((action == PipelineAction{PipelinePass::forward, 3, 1}));
  CHECK((action != PipelineAction{PipelinePass::backward, 3, 1}));
  CHECK((action != PipelineAction{PipelinePass::forward, 4, 1}));
  CHECK((action != PipelineAction{PipelinePass::forward, 3, 0}));
}

}  // namespace pacer::testing
