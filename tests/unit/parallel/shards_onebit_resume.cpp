// Checkpoints of 1-bit optimizers that the ranks of a node share: exact where parts are the same, else
// joined.
#include "support/catch.h"
#include "support/optimizers/onebit_refusals.h"
#include "support/parallel/shards_onebit_runs.h"

namespace pacer::testing::shards_onebit {

TEMPLATE_TEST_CASE("checkpoints of a shared 1-bit optimizer go on exactly, and anywhere",
                   "[shards][nodes][onebit_adam][onebit_lamb][resume]", OneBitAdam, OneBitLamb) {
  using O = TestType;
  int turn = 0;
  for (const bool blocks : {false, true}) {
    CAPTURE(blocks);
    const TemporaryFolder a, b;
    const auto options = options_of<O>().compress_alone(false);
    Run<O> wanted(2, 2, options, both(whole(), saving(a, 7)));
    Run<O> found(2, 2, options, both(sharded(blocks), saving(b, 7)));
    REQUIRE(run_beside(wanted, found, 0, 7) == "");
    {
      Run<O> again(2, 2, options, both(sharded(blocks), saving(b, 7)));
      REQUIRE(again.resume() == "");
      REQUIRE(run_beside(wanted, again, 7, 9) == "");
    }
    // Errors are joined where ranks have other parts; then both forms of a checkpoint are worth the same. Ranks and
    // kinds take turns: half of them go on from blocks, and the others from units.
    ++turn;
    for (const auto& [nodes, per_node] :
         {std::pair{2, 2}, {2, 1}, {1, 1}, {1, 2}, {3, 2}, {2, 4}, {4, 1}, {1, 4}}) {
      for (const int kind : {0, 1, 2}) {
        if (turn++ % 2 == 0 && !wants_long_tests()) continue;
        if (kind > 0 && nodes * per_node == 1) continue;
        CAPTURE(nodes, per_node, kind);
        const Uses use = kind == 0 ? whole() : sharded(kind == 2);
        Run<O> from_whole(nodes, per_node, options, both(use, saving(a, 100)));
        Run<O> from_parts(nodes, per_node, options, both(use, saving(b, 100)));
        REQUIRE(from_whole.resume() == "");
        REQUIRE(from_parts.resume() == "");
        if (nodes == 2 && per_node == 2) continue;  // exactly, or joined
        const auto one = from_whole.errors(), other = from_parts.errors();
        for (size_t rank = 0; rank < one.size(); ++rank)
          REQUIRE(differing_name(one[rank], other[rank]) == "");
        REQUIRE(run_beside(from_whole, from_parts, 7, 8) == "");
      }
    }
  }
}

namespace {

// A hook with a state that no checkpoint has.
struct Unsaved : Hook {
  Slot slot() const override { return Slot::record; }
  std::string hook_name() const override { return "unsaved"; }
  void save(NamedTensors& state) const override { state["x"] = at::ones({1}); }
  void load(const NamedTensors&) override {}
};

// The message of a run that resumes what another one has saved after so many steps.
using Adam = OneBitAdam;
std::string resumed(Run<Adam>& saved, int64_t steps, Run<Adam>& next) {
  for (int64_t t = 0; t < steps; ++t) REQUIRE(saved.step({gradients_of(saved.ranks, t, true)}) == "");
  const std::string message = next.resume();
  return message.empty() ? next.step({gradients_of(next.ranks, steps, true)}) : message;
}

}  // namespace

TEST_CASE("1-bit checkpoints from before the freeze and of nodes that exchanged nothing go on anywhere",
          "[shards][nodes][onebit_adam][resume]") {
  const auto options = options_of<Adam>().compress_alone(false);
  struct From {
    int nodes, per_node;
    int64_t steps;
  };
  int turn = 0;  // half of what there is goes on from shared optimizers, and the others from whole ones
  for (const From from : {From{2, 2, 2}, {1, 4, 7}}) {
    for (const bool shares : {false, true}) {
      ++turn;
      const TemporaryFolder folder;
      Run<Adam> saved(from.nodes, from.per_node, options,
                      both(shares ? sharded(true) : whole(), saving(folder, from.steps)));
      int64_t steps = from.steps;
      for (const auto& [nodes, per_node] : {std::pair{1, 4}, {2, 2}, {4, 1}, {2, 1}, {3, 2}, {1, 1}}) {
        for (const int kind : {0, 1, 2}) {
          if (turn++ % 2 == 0 && !wants_long_tests()) continue;
          CAPTURE(from.nodes, shares, nodes, per_node, kind);
          if (kind > 0 && nodes * per_node == 1) continue;
          const Uses use = kind == 0 ? whole() : sharded(kind == 2);
          Run<Adam> next(nodes, per_node, options, both(use, saving(folder, 100)));
          REQUIRE(resumed(saved, std::exchange(steps, 0), next) == "");
        }
      }
    }
  }
}

TEST_CASE("options of a 1-bit checkpoint win, and where they cannot, nothing is loaded",
          "[shards][nodes][onebit_adam][resume]") {
  const auto by_nodes = options_of<Adam>(), flat = options_of<Adam>().hierarchical(false);
  for (const bool saves_by_nodes : {false, true}) {
    const TemporaryFolder folder;
    Run<Adam> saved(2, 2, saves_by_nodes ? by_nodes : flat, both(whole(), saving(folder, 7)));
    Run<Adam> other(2, 2, saves_by_nodes ? flat : by_nodes, both(whole(), saving(folder, 100)));
    REQUIRE(resumed(saved, 7, other) == "");
  }
  for (const int64_t steps : {2, 7}) {
    for (const bool blocks : {false, true}) {
      const TemporaryFolder folder;
      Run<Adam> saved(2, 2, flat, both(whole(), saving(folder, steps)));
      Run<Adam> shared(2, 2, by_nodes, both(sharded(blocks), saving(folder, 100)));
      CHECK(unless_sentence(resumed(saved, steps, shared), {"cannot resume", "use hierarchical(true)"}) ==
            "");
    }
  }
}

TEST_CASE("errors of a node's parts that lie elsewhere are joined, also where they are as many",
          "[shards][nodes][onebit_adam][resume]") {
  const Uses one_unit = [](Session& session, DictatedBlocks&) {
    session.use(Shards(ShardsOptions().over(ShardGroup::node).unit_bytes(100'000'000)));
  };
  const TemporaryFolder folder;
  Run<Adam> saved(2, 3, options_of<Adam>(), both(sharded(true), saving(folder, 7)));
  Run<Adam> next(2, 3, options_of<Adam>(), both(one_unit, saving(folder, 100)));
  REQUIRE(resumed(saved, 7, next) == "");
  Run<Adam> again(2, 3, options_of<Adam>(), both(one_unit, saving(folder, 100)));
  REQUIRE(again.resume() == "");
  const auto before = saved.errors(), after = again.errors();
  int moved = 0;
  for (size_t rank = 0; rank < 3; ++rank) {
    const char* const parts = "onebit/first_of_parts";
    bool is_same = before[rank].at(parts).equal(after[rank].at(parts));
    for (const auto& [name, error] : after[rank]) {
      is_same = is_same && error.numel() == before[rank].at(name).numel();
    }
    for (const auto& [name, error] : after[rank]) {
      if (!contains(name, "/worker_error") || error.numel() == 0) continue;
      // Where they were joined, both workers have the mean.
      REQUIRE(error.equal(after[rank + 3].at(name)) == !is_same);
      moved += !is_same && error.numel() == before[rank].at(name).numel();
    }
  }
  CHECK(moved > 0);
}

TEST_CASE("where one rank refuses a checkpoint, those that share a 1-bit optimizer are told",
          "[shards][nodes][onebit_adam][resume]") {
  const TemporaryFolder folder;
  Run<Adam> saved(2, 2, options_of<Adam>(), both(sharded(false), saving(folder, 7)));
  int sessions = 0;
  Run<Adam> next(2, 2, options_of<Adam>(),
                 both(both(sharded(false), saving(folder, 100)), [&](Session& session, DictatedBlocks&) {
                   if (sessions++ == 1) session.use(std::make_shared<Unsaved>());
                 }));
  CHECK(contains(resumed(saved, 7, next), "rank 1"));
}

}  // namespace pacer::testing::shards_onebit
