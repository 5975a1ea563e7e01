// The simulation of pipelines: against closed forms, against the longest way through the graph of all passes,
// and against plans that cannot work.
#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <tuple>

#include <pacer/core/error.h>
#include <pacer/parallel/pipeline_simulation.h>

#include "support/catch.h"
#include "support/parallel/pipeline_plans.h"

namespace pacer::testing {
namespace {

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;

// Times of whole numbers, so that all sums are exact, also in shares of 2 to 4 chunks.
constexpr PipelineCosts kExactCosts{12, 12, 12, 0};

// When each pass can end at the earliest: no clocks and no queues, but the longest way through the graph
// whose edges are "before it on its rank" and "makes what it needs".
std::vector<std::vector<double>> earliest_ends(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  const auto plans = pipeline_plans(schedule);
  std::map<std::tuple<bool, int64_t, int64_t>, std::pair<size_t, size_t>> made_by;  // forward, micro, stage
  const auto stage_of = [&](size_t rank, size_t i) {
    return schedule.stage(static_cast<int64_t>(rank), plans[rank][i].chunk);
  };
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    for (size_t i = 0; i < plans[rank].size(); ++i) {
      const PipelineAction& action = plans[rank][i];
      if (action.pass == PipelinePass::backward_weight) continue;
      made_by[{action.pass == PipelinePass::forward, action.micro_batch, stage_of(rank, i)}] = {rank, i};
    }
  }
  std::map<std::pair<size_t, size_t>, double> known;
  const std::function<double(size_t, size_t)> end_of = [&](size_t rank, size_t i) {
    if (const auto found = known.find({rank, i}); found != known.end()) return found->second;
    const PipelineAction& action = plans[rank][i];
    const bool is_forward = action.pass == PipelinePass::forward;
    double begin = i > 0 ? end_of(rank, i - 1) : 0;
    const int64_t from = stage_of(rank, i) + (is_forward ? -1 : 1);
    if (action.pass != PipelinePass::backward_weight && from >= 0 && from < schedule.stages()) {
      const auto [maker, index] = made_by.at({is_forward, action.micro_batch, from});
      begin = std::max(begin, end_of(maker, index) + (maker == rank ? 0 : costs.transfer));
    }
    double cost = costs.forward;
    if (action.pass == PipelinePass::backward) cost = costs.backward_input + costs.backward_weight;
    if (action.pass == PipelinePass::backward_input) cost = costs.backward_input;
    if (action.pass == PipelinePass::backward_weight) cost = costs.backward_weight;
    return known[{rank, i}] = begin + cost / static_cast<double>(schedule.chunks);
  };
  std::vector<std::vector<double>> ends;
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    ends.emplace_back();
    for (size_t i = 0; i < plans[rank].size(); ++i) ends.back().push_back(end_of(rank, i));
  }
  return ends;
}

// Whether all ranks end where each has one queue for everything and a send ends when it is received.
bool ends_over_one_queue(const PipelineSchedule& schedule) {
  struct Message {
    bool is_sent;
    int64_t peer;
  };
  std::vector<std::deque<Message>> left;
  for (int64_t rank = 0; rank < schedule.ranks; ++rank) {
    left.emplace_back();
    for (const PipelineAction& action : pipeline_plan(schedule, rank)) {
      if (action.pass == PipelinePass::backward_weight) continue;
      const int64_t step = action.pass == PipelinePass::forward ? 1 : -1;
      if (rank - step >= 0 && rank - step < schedule.ranks) left.back().push_back({false, rank - step});
      if (rank + step >= 0 && rank + step < schedule.ranks) left.back().push_back({true, rank + step});
    }
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < left.size(); ++rank) {
      if (left[rank].empty()) continue;
      auto& peer = left[static_cast<size_t>(left[rank].front().peer)];
      if (peer.empty() || peer.front().peer != static_cast<int64_t>(rank)) continue;
      if (peer.front().is_sent == left[rank].front().is_sent) continue;
      left[rank].pop_front();
      peer.pop_front();
      moved = true;
    }
  }
  return std::all_of(left.begin(), left.end(), [](const auto& messages) { return messages.empty(); });
}

std::vector<PipelinePlan> plans_of(const std::vector<std::string>& texts) {
  std::vector<PipelinePlan> plans;
  for (const std::string& text : texts) plans.push_back(plan_of(text));
  return plans;
}

}  // namespace

TEST_CASE("idle time and micro-batches alive of hundreds of plans are those of the formulas",
          "[schedulers][pipeline]") {
  for (const PipelineSchedule& schedule : pipeline_schedules()) {
    INFO(schedule_text(schedule));
    const PipelineSimulation simulated = simulate_pipeline(schedule, kExactCosts);
    const auto p = schedule.ranks, m = schedule.micro_batches, v = schedule.chunks;
    // In chunks of passes, 12 / v each.
    int64_t gaps = 3 * (p - 1);
    if (schedule.order == PipelineOrder::zero_bubble) gaps = 2 * (p - 1) - (std::min(m, p) - 1);
    REQUIRE(simulated.total == static_cast<double>((3 * m * v + gaps) * 12 / v));
    for (size_t rank = 0; rank < static_cast<size_t>(p); ++rank) {
      const auto r = static_cast<int64_t>(rank);
      int64_t chunks_alive = m;
      if (schedule.order == PipelineOrder::one_f_one_b) chunks_alive = std::min(m, p - r);
      if (schedule.order == PipelineOrder::zero_bubble) chunks_alive = std::min(m, p);
      if (schedule.order == PipelineOrder::interleaved) {
        chunks_alive = std::min(m * v, v * p + p - 1 - 2 * r);
      }
      REQUIRE(simulated.alive[rank] == static_cast<double>(chunks_alive) / static_cast<double>(v));
      REQUIRE(pipeline_alive(schedule, r) == simulated.alive[rank]);
      REQUIRE(simulated.idle[rank] ==
              Approx(static_cast<double>(gaps) / static_cast<double>(3 * m * v + gaps)).margin(1e-12));
      REQUIRE(simulated.idle[rank] == Approx(pipeline_idle(schedule, kExactCosts)).margin(1e-12));
    }
  }
}

TEST_CASE("the idle share follows its formula for other times of the passes", "[schedulers][pipeline]") {
  for (const auto& [f, i, w] : std::vector<std::tuple<double, double, double>>{
           {1, 1.2, 0.8}, {1, 1.5, 0.9}, {2, 2, 1}, {5, 1, 1}, {1, 3, 1}, {3, 4, 2}, {1, 1, 0}, {2, 1, 1}}) {
    for (const PipelineSchedule& schedule : pipeline_schedules()) {
      INFO(schedule_text(schedule) << ", times " << f << ", " << i << ", " << w);
      const PipelineCosts costs{f, i, w};
      REQUIRE(pipeline_idle(schedule, costs) ==
              Approx(simulate_pipeline(schedule, costs).idle[0]).margin(1e-9));
    }
  }
  // The shares that the papers give, at equal times.
  CHECK(pipeline_idle({PipelineOrder::gpipe, 4, 8}) == Approx(3 / 11.0));
  CHECK(pipeline_idle({PipelineOrder::one_f_one_b, 8, 32}) == Approx(7 / 39.0));
  CHECK(pipeline_idle({PipelineOrder::interleaved, 4, 8, 2}) == Approx(3 / 19.0));
  CHECK(pipeline_idle({PipelineOrder::zero_bubble, 4, 8}) == Approx(3 / 27.0));
}

TEST_CASE("every pass ends as early as what it needs allows", "[schedulers][pipeline]") {
  for (const PipelineCosts& costs :
       {kExactCosts, PipelineCosts{24, 36, 12, 0}, PipelineCosts{24, 36, 12, 3}}) {
    for (const PipelineSchedule& schedule : pipeline_schedules()) {
      INFO(schedule_text(schedule));
      const auto ends = earliest_ends(schedule, costs);
      const PipelineSimulation simulated = simulate_pipeline(schedule, costs);
      double last = 0;
      for (size_t rank = 0; rank < ends.size(); ++rank) {
        REQUIRE(simulated.intervals[rank].size() == ends[rank].size());
        bool is_equal = true;
        double busy_until = 0;
        for (size_t k = 0; k < ends[rank].size(); ++k) {
          const PipelineInterval& interval = simulated.intervals[rank][k];
          is_equal = is_equal && interval.end == ends[rank][k] && interval.begin >= busy_until;
          busy_until = interval.end;
        }
        REQUIRE(is_equal);
        last = std::max(last, busy_until);
      }
      REQUIRE(simulated.total == last);
    }
  }
}

TEST_CASE("messages of one queue go one after the other", "[schedulers][pipeline]") {
  // Two forward passes of length 1, messages that take 5 each: they arrive at 6 and at 11.
  const auto simulated = simulate_pipeline({PipelineOrder::gpipe, 2, 2}, {1, 1, 1, 5});
  CHECK(simulated.intervals[1][0].begin == 6);
  CHECK(simulated.intervals[1][1].begin == 11);
  CHECK(simulated.intervals[1][2].end == 14);
  CHECK(simulated.intervals[0][2].begin == 19);
}

TEST_CASE("zero bubble stands idle less than 1F1B, and holds no more than 1F1B's first rank",
          "[schedulers][pipeline]") {
  for (int64_t ranks = 2; ranks <= 8; ++ranks) {
    for (int64_t micro_batches = 1; micro_batches <= 20; ++micro_batches) {
      const auto plain = simulate_pipeline({PipelineOrder::one_f_one_b, ranks, micro_batches});
      const auto filled = simulate_pipeline({PipelineOrder::zero_bubble, ranks, micro_batches});
      INFO(ranks << " ranks, " << micro_batches << " micro-batches");
      REQUIRE(filled.total < plain.total);
      REQUIRE(*std::max_element(filled.alive.begin(), filled.alive.end()) == plain.alive[0]);
    }
  }
}

TEST_CASE("1F1B and zero bubble need more than one queue a rank", "[schedulers][pipeline]") {
  std::map<PipelineOrder, int> stuck;
  int schedules = 0;
  for (int64_t ranks = 2; ranks <= 8; ++ranks) {
    for (int64_t micro_batches = 1; micro_batches <= 20; ++micro_batches, ++schedules) {
      for (const auto schedule :
           {PipelineOrder::gpipe, PipelineOrder::one_f_one_b, PipelineOrder::zero_bubble}) {
        stuck[schedule] += !ends_over_one_queue({schedule, ranks, micro_batches});
      }
    }
  }
  CHECK(schedules == 140);
  CHECK(stuck[PipelineOrder::gpipe] == 0);
  CHECK(stuck[PipelineOrder::one_f_one_b] == 133);
  CHECK(stuck[PipelineOrder::zero_bubble] == 133);
}

TEST_CASE("plans that cannot work are refused by rank and action", "[schedulers][pipeline]") {
  struct Wrong {
    std::vector<std::string> plans;
    const char* part;
  };
  const auto wrong = std::vector<Wrong>{
      {{"F0 B0 F1 B1", "F0 F1 B0 B1"},
       "rank 0 at its action 1, backward of micro-batch 0, chunk 0: it waits for gradients of rank 1, which "
       "stands at forward of micro-batch 1, chunk 0"},
      {{"F0 F1 B0 B1", "F0 B0"},
       "rank 0 at its action 3, backward of micro-batch 1, chunk 0: it waits for "
       "gradients of rank 1, which has ended"},
      {{"F0 B0", "F0 B0 F1 B1"},
       "rank 1 at its action 2, forward of micro-batch 1, chunk 0: it waits for activations of rank 0, which "
       "has ended"},
      {{"F0 F1 B0 B1", "F1 F0 B0 B1"},
       "rank 1 at its action 0, forward of micro-batch 1, chunk 0: what comes "
       "first is micro-batch 0 of chunk 0"},
      {{"F0 F1 B0 B1", "F0 F1 B1 B0"}, "ranks 1 and 0 send and receive in different orders"},
      {{"F0 F0 B0 B0", "F0 B0"}, "rank 0 at its action 1, forward of micro-batch 0, chunk 0, a second time"},
      {{"F0 B0", "F0 B0 I0"},
       "rank 1 at its action 2, input half of backward of micro-batch 0, chunk 0, a second"},
      {{"B0 F0", "F0 B0"}, "rank 0 at its action 0, backward of micro-batch 0, chunk 0, before the pass"},
      {{"F0 W0 I0", "F0 B0"},
       "rank 0 at its action 1, weight half of backward of micro-batch 0, chunk 0, before"},
      {{"F0 I0", "F0 B0"}, "rank 0 ends before micro-batch 0 went all the way backward through chunk 0"},
      {{"F0 B0", "F0"}, "rank 1 ends before micro-batch 0"},
      {{"F0 B0", "F0b B0b"}, "names what there is not, rank 1 at its action 0"},
  };
  for (const auto& [plans, part] : wrong) {
    CHECK_THROWS_WITH(simulate_pipeline(plans_of(plans), 1), ContainsSubstring(part));
    CHECK_THROWS_AS(simulate_pipeline(plans_of(plans), 1), InvalidArgument);
  }
  CHECK_THROWS_WITH(simulate_pipeline({}, 1), ContainsSubstring("there is no plan"));
  CHECK_THROWS_WITH(simulate_pipeline({{}}, 0), ContainsSubstring("at least one chunk, not 0"));
  CHECK_THROWS_WITH(simulate_pipeline({{{PipelinePass::forward, -1, 0}}}, 1), ContainsSubstring("-1"));
}

TEST_CASE("empty plans take no time, and chunks of one rank need no messages", "[schedulers][pipeline]") {
  const auto nothing = simulate_pipeline({{}, {}}, 1);
  CHECK(nothing.total == 0);
  CHECK(nothing.idle == std::vector<double>{0, 0});
  CHECK(nothing.alive == std::vector<double>{0, 0});
  const auto alone = simulate_pipeline({PipelineOrder::interleaved, 1, 3, 2}, {2, 2, 2, 100});
  CHECK(alone.total == 18);
  CHECK(alone.idle[0] == 0);
  CHECK(pipeline_idle({PipelineOrder::gpipe, 1, 3}, {0, 0, 0}) == 0);
}

TEST_CASE("times of passes that are no times are refused", "[schedulers][pipeline]") {
  const PipelineSchedule schedule{PipelineOrder::zero_bubble, 2, 4};
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               infinity = std::numeric_limits<double>::infinity();
  for (const PipelineCosts& costs : {PipelineCosts{-1, 1, 1}, PipelineCosts{1, nan, 1},
                                     PipelineCosts{1, 1, infinity}, PipelineCosts{1, 1, 1, -1}}) {
    CHECK_THROWS_WITH(simulate_pipeline(schedule, costs), ContainsSubstring("finite and not negative"));
    CHECK_THROWS_AS(pipeline_idle(schedule, costs), InvalidArgument);
  }
  CHECK_THROWS_WITH(pipeline_idle(schedule, {1, 1, 1, 2}), ContainsSubstring("no transfer times, but got 2"));
  CHECK_THROWS_WITH(pipeline_idle(schedule, {1, 2, 1.5}), ContainsSubstring("but it takes 1.5"));
  CHECK_THROWS_AS(pipeline_idle(schedule, {2, 1, 1.5}), InvalidArgument);
  CHECK_THROWS_AS(pipeline_idle({PipelineOrder::gpipe, 0, 1}), InvalidArgument);
}

}  // namespace pacer::testing
