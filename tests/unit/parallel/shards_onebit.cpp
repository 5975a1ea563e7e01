// 1-bit optimizers whose momentum, variance and errors the ranks of a node share: the bits of nodes whose
// ranks all have everything, where rows of the exchange hold the same elements.
#include <cmath>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>

#include "support/catch.h"
#include "support/optimizers/onebit_refusals.h"
#include "support/parallel/shard_runs.h"
#include "support/parallel/shards_onebit_runs.h"
#include "support/samples.h"

namespace pacer::testing::shards_onebit {
namespace {

// The norm of a group is one of averaged gradients, which these optimizers refuse.
bool is_refused(const RegisteredHook& hook) { return hook.name == "clipping of a group by another norm"; }

}  // namespace

TEMPLATE_TEST_CASE("ranks of a node that share a 1-bit optimizer have the bits of those that do not",
                   "[shards][nodes][onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  using O = TestType;
  Turns turns(2);
  for (const auto& [nodes, per_node] : {std::pair{2, 2}, {3, 2}, {2, 3}, {2, 1}, {1, 2}}) {
    for (const bool blocks : {false, true}) {
      if (!turns.is_next()) continue;
      CAPTURE(nodes, per_node, blocks);
      auto options = options_of<O>();
      if constexpr (std::is_same_v<O, OneBitAdam>) options.refresh_variance_every(5);
      const Uses clipping = [](Session& session, DictatedBlocks&) { session.use(GradientClipping(0.5)); };
      Run<O> wanted(nodes, per_node, options, both(whole(), clipping));
      Run<O> found(nodes, per_node, options, both(sharded(blocks), clipping));
      REQUIRE(run_beside(wanted, found, 0, 14) == "");
      REQUIRE(found.ranks.optimizers[0]->phase() == OneBitPhase::compressed);
      REQUIRE(found.ranks.optimizers[0]->skipped_steps() == 1);
      // Of the largest part, in the steps after the freeze that were not skipped or refreshed.
      const int64_t bits = 8 * per_node * found.ranks.optimizers[0]->bytes_sent();
      CHECK((nodes == 1 || bits > 0));
      CHECK(bits <= 8 * per_node * wanted.ranks.optimizers[0]->bytes_sent());
    }
  }
}

// Where each rank is a node, with any tensors.
TEST_CASE("every hook goes with a 1-bit optimizer on nodes of one rank as with DataParallel, to the bit",
          "[shards][nodes][onebit_adam][onebit_lamb][session]") {
  int first = 0;
  for (const RegisteredOptimizer& optimizer : optimizers_by_nodes()) {
    Turns turns(5, first++);
    for (const RegisteredHook& hook : all_hooks()) {
      for (const Sharded what : {Sharded::state, Sharded::gradients, Sharded::parameters}) {
        if (!turns.is_next() || is_refused(hook)) continue;
        CAPTURE(optimizer.name, hook.name, shards::name_of(what));
        // Over ranks first and over micro-steps then.
        if (what != Sharded::state && hook.kind == "accumulation") continue;
        auto wanted = shards::runs_of(optimizer, {hook}, 2, shards::data_parallel, 1);
        auto found = shards::runs_of(optimizer, {hook}, 2, shards::sharded(what, ShardGroup::node), 1);
        for (int step = 0; step < 6; ++step) {
          REQUIRE(shards::step_all(wanted) == "");
          REQUIRE(shards::step_all(found) == "");
          REQUIRE(shards::model_difference(wanted, found) == "");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("so they have with 16-bit parameters, micro-steps and a freeze by itself",
                   "[shards][nodes][onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  using O = TestType;
  Turns turns(3);
  for (const bool blocks : {false, true}) {
    CAPTURE(blocks);
    for (const auto& [nodes, per_node] : {std::pair{2, 2}, {2, 1}, {1, 2}}) {
      for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
        if (!turns.is_next()) continue;
        CAPTURE(nodes, per_node, dtype);
        Run<O> wanted(nodes, per_node, options_of<O>(), whole(), dtype);
        Run<O> found(nodes, per_node, options_of<O>(), sharded(blocks), dtype);
        REQUIRE(run_beside(wanted, found, 0, 8) == "");
      }
    }
    const Uses twice = [](Session& session, DictatedBlocks&) { session.use(GradientAccumulation(2)); };
    Run<O> plain(2, 2, options_of<O>(), both(whole(), twice));
    Run<O> shared(2, 2, options_of<O>(), both(sharded(blocks), twice));
    REQUIRE(run_beside(plain, shared, 0, 9, 2) == "");
    auto options = options_of<O>();
    options.freeze_step(std::nullopt).freeze_automatically(20).betas({0.9, 0.5});
    Run<O> by_itself(2, 2, options, whole()), also(2, 2, options, sharded(blocks));
    REQUIRE(run_beside(by_itself, also, 0, 9) == "");
    REQUIRE(also.ranks.optimizers[0]->frozen_at().has_value());
  }
}

TEST_CASE("every hook goes with a 1-bit optimizer that the ranks of a node share",
          "[shards][nodes][onebit_adam][onebit_lamb][session]") {
  int first = 0;
  for (const RegisteredOptimizer& optimizer : optimizers_by_nodes()) {
    Turns turns(5, first++);
    for (const RegisteredHook& hook : all_hooks()) {
      for (const Sharded what : {Sharded::state, Sharded::gradients, Sharded::parameters}) {
        if (!turns.is_next() || is_refused(hook)) continue;
        CAPTURE(optimizer.name, hook.name, shards::name_of(what));
        shards::Runs runs = shards::runs_of(optimizer, {hook}, 4, shards::sharded(what, ShardGroup::node), 2);
        for (int step = 0; step < 8; ++step) REQUIRE(shards::step_all(runs) == "");
        REQUIRE(shards::model_difference(runs, runs) == "");
        REQUIRE(dynamic_cast<OneBitOptimizer&>(*runs[0]->optimizer).phase() == OneBitPhase::compressed);
        REQUIRE(std::isfinite(runs[0]->loss));
      }
    }
  }
}

TEST_CASE("a 1-bit optimizer says who can share it", "[shards][nodes][onebit_adam][errors]") {
  const auto use = [](const OneBitAdamOptions& options, const Uses& uses, const auto& before) {
    return refusal([&] {
      Run<OneBitAdam> run(2, 2, options, [&](Session& session, DictatedBlocks& model) {
        before(model);
        uses(session, model);
      });
      const auto gradients = run.ranks.gradients(0);
      const std::string message = run.step({gradients});
      require(message.empty(), message);
    });
  };
  const auto nothing = [](DictatedBlocks&) {};
  const auto flat = OneBitAdamOptions(options_of<OneBitAdam>()).hierarchical(false);
  CHECK(use(options_of<OneBitAdam>(), sharded(true),
            [](DictatedBlocks& model) { model->parameters()[1].requires_grad_(false); }) == "<no exception>");
  const Uses over_world = [](Session& session, DictatedBlocks&) { session.use(Shards()); };
  const std::vector<std::string> hints = {"hierarchical(true)", "over(ShardGroup::node)"};
  CHECK(unless_sentence(use(options_of<OneBitAdam>(), over_world, nothing), hints) == "");
  CHECK(unless_sentence(use(flat, sharded(false), nothing), hints) == "");
  CHECK(contains(use(options_of<OneBitAdam>(), sharded(false),
                     [](DictatedBlocks& model) { model->parameters()[1].requires_grad_(false); }),
                 "is frozen, and so not shared out"));
}

}  // namespace pacer::testing::shards_onebit
