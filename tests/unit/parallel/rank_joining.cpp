// Parameters that join or leave a run of several ranks between any two micro-steps.
#include <functional>
#include <string>
#include <utility>
#include <vector>

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

TEST_CASE("a parameter that joins a window that ends early sits its step out, on any number of ranks",
          "[session][ranks][gradients]") {
  for (const auto& make : {kAdamW, kFused}) {
    for (const bool adds : {true, false}) {
      CAPTURE(adds);
      const auto use = [](int64_t count) {
        return [=](Session& s, Model&) { s.use(GradientAccumulation(count)).use(GradientClipping(0.1)); };
      };
      Ranked ranks = ranks_of(2, make, use(4), adds), alone = ranks_of(1, make, use(8), adds);
      const Tensor before = alone[0]->parameter(6).detach().clone();
      const auto join = [&](Rank& r) { adds ? add_last(r) : void(r.parameter(6).requires_grad_(true)); };
      REQUIRE(run(ranks, [&](Rank& r, int rank) {
                if (!adds) r.parameter(6).requires_grad_(false);
                for (int64_t k = 0; k < 2; ++k) r.micro_step(2 * k + rank);
                join(r);
                r.session->finish();
              }) == "");
      if (!adds) alone[0]->parameter(6).requires_grad_(false);
      for (int64_t k = 0; k < 4; ++k) alone[0]->micro_step(k);
      join(*alone[0]);
      alone[0]->session->finish();
      CHECK(alone[0]->session->progress().step == 1);
      CHECK(alone[0]->parameter(6).equal(before));
      CHECK(distance(*ranks[0], *ranks[1]) == 0);
      CHECK(distance(*ranks[0], *alone[0]) < 1e-5);
    }
  }
}

namespace {

// Two ranks that end a window after its first pass, behind which rank r does `join` with a parameter of its own
// values that no rank had before.
std::vector<std::string> messages_of_early_end(Ranked& ranks,
                                               const std::function<void(Rank&, int, const Tensor&)>& join) {
  return messages_of(ranks, [&](Rank& r, int rank) {
    r.micro_step(rank);
    join(r, rank, r.model->register_parameter("late", torch::full({2}, 1.0 + rank)));
    r.session->finish();
  });
}

void add_group(Rank& r, const Tensor& late) {
  r.optimizer->add_param_group(torch::optim::OptimizerParamGroup(
      std::vector<Tensor>{late}, r.optimizer->param_groups()[0].options().clone()));
}

}  // namespace

TEST_CASE("ranks share or compare the values of a parameter that joins a window that ends early",
          "[session][ranks][gradients]") {
  const auto use = [](const DataParallelOptions& options) {
    return [=](Session& s, Model&) { s.use(GradientAccumulation(4)).use(DataParallel(options)); };
  };
  const auto join = [](Rank& r, int, const Tensor& late) { add_group(r, late); };
  Ranked ranks = ranks_of(2, kFused, use({}));
  REQUIRE(first_of(messages_of_early_end(ranks, join)) == "");
  for (const auto& r : ranks) CHECK(r->model->named_parameters()["late"].eq(1).all().item<bool>());
  CHECK(distance(*ranks[0], *ranks[1]) == 0);

  ranks = ranks_of(2, kFused, use(DataParallelOptions().initial_parameters(InitialParameters::check)));
  for (const std::string& message : messages_of_early_end(ranks, join)) {
    CHECK(contains(message, "initial value of parameter late"));
  }
}

TEST_CASE("a parameter that joins a window that ends early on one rank only is named by all",
          "[session][ranks][gradients]") {
  const auto use = [](Session& s, Model&) { s.use(GradientAccumulation(4)); };
  const auto adds = [](Rank& r, int rank, const Tensor& late) {
    if (rank == 1) add_group(r, late);
  };
  Ranked ranks = ranks_of(2, kFused, use);
  for (const std::string& message : messages_of_early_end(ranks, adds)) {
    CHECK(contains(message, "parameter groups: 2"));
  }
  const auto enters = [](Rank& r, int rank, const Tensor& late) {
    if (rank == 1) r.optimizer->param_groups()[0].params().push_back(late);
  };
  ranks = ranks_of(2, kFused, use);
  for (const std::string& message : messages_of_early_end(ranks, enters)) {
    CHECK(contains(message, "Float [2]"));
  }
}

TEST_CASE("shards refuse a parameter that joins a window that ends early", "[session][ranks][gradients]") {
  Ranked ranks =
      ranks_of(2, kFused, [](Session& s, Model&) { s.use(GradientAccumulation(4)).use(Shards()); });
  const auto join = [](Rank& r, int, const Tensor& late) { add_group(r, late); };
  for (const std::string& message : messages_of_early_end(ranks, join)) {
    CHECK(contains(message, "after Shards had shared them out"));
  }
}

}  // namespace pacer::testing::rank_gradients
