// Windows of ParameterShards that are given up while their gradients are being added up: what is under way neither
// gets into later sums nor is forgotten.
#include <chrono>
#include <exception>
#include <future>
#include <string>
#include <vector>

#include <pacer/parallel/parameter_shards.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::dropped_shards {
namespace {

using namespace std::chrono_literals;
using Named = ParameterShards::Group;

Named some_parameters() {
  Named named;
  for (const int64_t size : {300, 5}) {  // as many as there is memory for before a sum must have come
    named.emplace_back(std::to_string(named.size()), torch::ones({size}).requires_grad_());
  }
  return named;
}

ParameterShardsOptions a_unit_for_each() { return ParameterShardsOptions().unit_bytes(1); }

// From the last parameter down to number `first`: each gets the gradient `factor`.
void backward(const Named& named, double factor, size_t first = 0) {
  for (size_t i = named.size(); i-- > first;) (named[i].second * factor).sum().backward();
}

bool all_are(const ParameterShards& shards, double value) {
  for (const auto& part : shards.parts()) {
    if (!part.gradient.eq(value).all().item<bool>()) return false;
  }
  return true;
}

Ranks two_ranks(int ranks_per_node = 0) {
  return Communicator::in_process(2, by_nodes_of(ranks_per_node).timeout(20s));
}

void wait_for(std::promise<void>& event) {
  RANK_REQUIRE(event.get_future().wait_for(20s) == std::future_status::ready);
}

}  // namespace

TEST_CASE("sums of a window that was dropped do not get into later ones of shards", "[shards]") {
  const auto worlds = two_ranks();
  std::promise<void> has_dropped, has_sent;
  CHECK(first_of(run_ranks(2, [&](int rank) {
          const Named named = some_parameters();
          ParameterShards shards(named, worlds[static_cast<size_t>(rank)], a_unit_for_each());
          if (rank == 1) wait_for(has_dropped);
          shards.begin_backward();
          backward(named, 100);
          shards.drop();
          shards.drop();  // there is nothing more
          (rank == 0 ? has_dropped : has_sent).set_value();
          ParameterShards::Pass nothing;  // of which no unit is sent
          for (const auto& item : named) nothing.absent.push_back(item.second);
          nothing.absent_in_all = nothing.absent;
          shards.begin_backward(nothing);
          shards.end_backward();
          shards.wait();
          if (rank == 0) wait_for(has_sent);  // only now all ranks have added to what was dropped
          RANK_REQUIRE(all_are(shards, 0));
          for (int window = 0; window < 2; ++window) {
            for (const bool is_last : {false, true}) {
              ParameterShards::Pass pass;
              pass.is_last = is_last;
              shards.begin_backward(pass);
              backward(named, 2 + rank);
              shards.end_backward();
            }
            shards.wait();
            RANK_REQUIRE(all_are(shards, 2 * 5));
          }
        })) == "");
}

TEST_CASE(
    "a window of shards may be dropped behind some passes, and before or behind the end of the last one",
    "[shards]") {
  for (const bool every : {false, true}) {
    CAPTURE(every);
    const auto worlds = two_ranks();
    CHECK(first_of(run_ranks(2, [&](int rank) {
            const Named named = some_parameters();
            ParameterShards shards(named, worlds[static_cast<size_t>(rank)],
                                   a_unit_for_each().reduce_every_backward(every));
            ParameterShards::Pass pass;
            pass.is_last = false;
            shards.begin_backward(pass);
            backward(named, 100);
            shards.end_backward();
            shards.begin_backward();
            backward(named, 100);
            if (rank == 0) shards.end_backward();
            shards.drop();
            shards.begin_backward();
            backward(named, 2 + rank);
            shards.end_backward();
            shards.wait();
            RANK_REQUIRE(all_are(shards, 5));
          })) == "");
  }
}

TEST_CASE("a sum over replicas that was dropped does not get into the next one", "[shards][nodes]") {
  const auto worlds = two_ranks(/*ranks_per_node=*/1);
  std::promise<void> has_dropped;
  CHECK(first_of(run_ranks(2, [&](int rank) {
          const auto& world = worlds[static_cast<size_t>(rank)];
          const Named named = some_parameters();
          ParameterShards shards(named, world->node(), a_unit_for_each(), world->between_nodes());
          if (rank == 1) wait_for(has_dropped);
          shards.begin_backward();
          backward(named, 100);
          shards.drop();
          if (rank == 0) has_dropped.set_value();
          shards.begin_backward();
          backward(named, 2 + rank);
          shards.end_backward();
          shards.wait();
          RANK_REQUIRE(all_are(shards, 5));
        })) == "");
}

TEST_CASE("ranks whose shards have sent different sums of a window that was dropped are told so",
          "[shards]") {
  const auto worlds = two_ranks();
  const auto messages = run_ranks(2, [&](int rank) {
    const Named named = some_parameters();
    ParameterShards shards(named, worlds[static_cast<size_t>(rank)], a_unit_for_each());
    shards.begin_backward();
    backward(named, 1, /*first=*/rank == 0 ? 1 : 0);
    shards.drop();
    shards.begin_backward();
  });
  for (const std::string& message : messages) {
    CHECK(contains(message, "sums sent by rank 0: 1, by rank 1: 2"));
    CHECK(contains(message, "leave()"));
  }
}

TEST_CASE("that the sums of a dropped window failed is an error of the next one of shards", "[shards]") {
  const auto worlds = two_ranks();
  const auto messages = run_ranks(2, [&](int rank) {
    if (rank == 1) return worlds[1]->leave("it goes no further");
    const Named named = some_parameters();
    ParameterShards shards(named, worlds[0], a_unit_for_each());
    shards.begin_backward();
    try {
      backward(named, 1);
    } catch (const std::exception&) {  // the other rank had left by then
    }
    shards.drop();
    shards.begin_backward();
  });
  CHECK(contains(messages[0], "it goes no further"));
}

TEST_CASE("where parts are kept, gathers come behind the sums that were dropped", "[shards][blocks]") {
  const auto worlds = two_ranks();
  CHECK(first_of(run_ranks(2, [&](int rank) {
          const Named named = some_parameters();
          std::vector<ParameterShards::Group> groups;
          for (const auto& item : named) groups.push_back({item});
          ParameterShards shards(groups, worlds[static_cast<size_t>(rank)]);
          shards.keep_parts();
          for (const double factor : {100, 2 + rank}) {
            for (size_t group = 0; group < groups.size(); ++group) shards.gather(group);
            for (const auto& item : named) RANK_REQUIRE(item.second.eq(1).all().item<bool>());
            shards.begin_backward();
            backward(named, factor);
            if (factor == 100) {
              shards.drop();
              continue;
            }
            shards.end_backward();
            shards.wait();
            RANK_REQUIRE(all_are(shards, 5));
          }
        })) == "");
}

}  // namespace pacer::testing::dropped_shards
