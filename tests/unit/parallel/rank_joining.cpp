// Parameters that join or leave a run of several ranks between any two micro-steps.
#include <string>
#include <utility>

#include "support/catch.h"
#include "support/parallel/rank_gradients.h"

namespace pacer::testing::rank_gradients {

TEST_CASE("parameters that join or leave between micro-steps train as on one rank",
          "[session][ranks][gradients]") {
  const std::vector<std::pair<std::string, MakeOptimizer>> optimizers = {
      {"torch", kAdamW},
      {"fused", kFused},
      {"1-bit, warm-up", [](const auto& parameters, const auto& world) {
         return std::make_unique<OneBitAdam>(parameters, OneBitAdamOptions(0.01).freeze_step(100), world);
       }}};
  for (const auto& [name, make] : optimizers) {
    for (const std::string change : {"unfreeze", "freeze", "add"}) {
      CAPTURE(name, change);
      const auto use = [](int64_t count) {
        return [=](Session& s, Model&) { s.use(GradientAccumulation(count)); };
      };
      Ranked ranks = ranks_of(2, make, use(2), change == "add"),
             alone = ranks_of(1, make, use(4), change == "add");
      for (Ranked* all : {&ranks, &alone}) {
        for (auto& r : *all) {
          if (change == "unfreeze") r->parameter(6).requires_grad_(false);
        }
      }
      const auto make_change = [&](Rank& r) {
        if (change == "add") {
          add_last(r);
        } else {
          r.parameter(6).requires_grad_(change == "unfreeze");
        }
      };
      for (int64_t t = 0; t < 3; ++t) {
        REQUIRE(run(ranks, [&](Rank& r, int rank) {
                  r.micro_step(4 * t + rank);
                  if (t == 1) make_change(r);
                  r.micro_step(4 * t + 2 + rank);
                }) == "");
        for (int64_t k = 0; k < 4; ++k) {
          alone[0]->micro_step(4 * t + k);
          if (t == 1 && k == 1) make_change(*alone[0]);
        }
      }
      CHECK(distance(*ranks[0], *ranks[1]) == 0);
      CHECK(distance(*ranks[0], *alone[0]) < 1e-5);
    }
  }
}

TEST_CASE(
    "in a compressed run a parameter may be unfrozen inside a window, and a group that is added is refused",
    "[session][ranks][gradients]") {
  for (const bool overlap : {false, true}) {
    for (const bool adds : {false, true}) {
      CAPTURE(overlap, adds);
      Ranked ranks = ranks_of(
          2, onebit(overlap), [](Session& s, Model&) { s.use(GradientAccumulation(2)); }, adds);
      const auto messages = messages_of(ranks, [&](Rank& r, int rank) {
        if (!adds) r.parameter(6).requires_grad_(false);
        for (int64_t t = 0; t < 8; ++t) {
          r.micro_step(4 * t + rank);
          if (t == 5 && adds) {
            add_last(r);
          } else if (t == 5) {
            r.parameter(6).requires_grad_(true);
          }
          r.micro_step(4 * t + 2 + rank);
        }
      });
      for (const std::string& message : messages) {
        if (adds) {
          CHECK(contains(message, "a parameter group was added after the variance froze"));
        } else {
          CHECK(message == "");
        }
      }
      if (!adds) CHECK(distance(*ranks[0], *ranks[1]) == 0);
    }
  }
}

}  // namespace pacer::testing::rank_gradients
