// Shards over the ranks of a node: each node has all parts, and sums of gradients travel between nodes.
#include <pacer/collectives/detail/in_process_transport.h>

#include "support/catch.h"
#include "support/parallel/shard_runs.h"
#include "support/session/hook_pairs.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using namespace shards;
using Catch::Matchers::ContainsSubstring;

struct Nodes {
  int nodes, per_node;
  int ranks() const { return nodes * per_node; }
};

// Few bits, so that sums are exact in every order and dtype; the same if it is done twice.
Tensor coarse(const Tensor& gradient) { return (gradient * 32).clamp(-2, 2).round() / 32; }

Adds with_coarse_gradients(const Adds& add) {
  return [add](SmallRun& run) {
    for (const Tensor& parameter : run.model->parameters()) {
      parameter.register_hook([](const Tensor& gradient) { return coarse(gradient); });
    }
    add(run);
  };
}

}  // namespace

TEST_CASE("over nodes, every optimizer and every pair of hooks train as with DataParallel, to the bit",
          "[shards][nodes][session]") {
  const auto optimizers = shared_optimizers();
  const std::vector<Nodes> all_nodes = {{2, 2}, {3, 1}, {2, 1}, {1, 2}, {3, 2}, {2, 3}};
  size_t next = 0;
  for (const auto& pair : hooks_and_pairs(/*one_in=*/7)) {
    const auto what = static_cast<Sharded>(next % 3);
    const RegisteredOptimizer& optimizer = optimizers[next % optimizers.size()];
    const Nodes nodes = all_nodes[next++ / 2 % all_nodes.size()];
    INFO(optimizer.name << ", " << names_of(pair) << ", " << nodes.nodes << " nodes of " << nodes.per_node
                        << ", " << name_of(what));
    Runs wanted = runs_of(optimizer, pair, nodes.ranks(), with_coarse_gradients(data_parallel));
    Runs found = runs_of(optimizer, pair, nodes.ranks(),
                         with_coarse_gradients(sharded(what, ShardGroup::node)), nodes.per_node);
    for (int step = 0; step < 4; ++step) {
      REQUIRE(step_all(wanted) == "");
      REQUIRE(step_all(found) == "");
      REQUIRE(model_difference(wanted, found) == "");
    }
  }
}

// A rank for each node that takes its micro-steps one after the other adds in the same order.
TEST_CASE("over nodes, gradients are added inside them first, in rank order, and between them then",
          "[shards][nodes]") {
  const auto optimizers = shared_optimizers();
  const RegisteredOptimizer& adamw = optimizers.front();
  for (const Nodes nodes : {Nodes{2, 2}, {3, 2}, {2, 3}, {2, 4}, {4, 1}}) {
    RegisteredHook accumulation{"accumulation", "accumulation", false,
                                [per_node = nodes.per_node](Session& session, SmallModel&, EpochSampler&) {
                                  session.use(GradientAccumulation(per_node));
                                }};
    const auto clipping = hooks_named({"clipping"});
    for (const Sharded what : {Sharded::state, Sharded::gradients, Sharded::parameters}) {
      CAPTURE(nodes.nodes, nodes.per_node, name_of(what));
      Runs wanted = runs_of(adamw, {accumulation, clipping.front()}, nodes.nodes, data_parallel);
      Runs found = runs_of(adamw, clipping, nodes.ranks(), sharded(what, ShardGroup::node), nodes.per_node);
      for (int64_t step = 0; step < 5; ++step) {
        REQUIRE(on_all(wanted, [&](SmallRun& run) {
                  for (int64_t micro_step = 0; micro_step < nodes.per_node; ++micro_step) {
                    const int64_t rank = run.world->rank() * nodes.per_node + micro_step;
                    auto [ids, targets] = small_batch(step * nodes.ranks() + rank);
                    auto [x, y] = run.session->begin(ids, targets);
                    run.session->backward(run.model->loss(x, y));
                    run.session->step();
                  }
                }) == "");
        REQUIRE(step_all(found) == "");
        REQUIRE(model_difference(wanted, found) == "");
      }
    }
  }
}

TEST_CASE("over nodes, values travel inside them and sums of parts between them", "[shards][nodes]") {
  const auto optimizers = shared_optimizers();
  for (const Nodes nodes : {Nodes{2, 2}, {2, 3}, {4, 1}, {1, 4}}) {
    CAPTURE(nodes.nodes, nodes.per_node);
    Runs runs = runs_of(optimizers.front(), {}, nodes.ranks(), sharded(Sharded::gradients, ShardGroup::node),
                        nodes.per_node);
    constexpr int64_t kSteps = 2;
    for (int64_t step = 0; step < kSteps; ++step) REQUIRE(step_all(runs) == "");
    const auto bytes = [&](const std::string& group, const std::string& operation) {
      int64_t sum = 0;
      for (const Traffic& row : runs[0]->world->traffic()) {
        const bool is_it = group.empty() ? row.group.empty() : row.group.rfind(group, 0) == 0;
        if (is_it && row.operation == operation) sum += row.bytes_sent;
      }
      return sum;
    };
    int64_t part = 0;
    const auto shards = runs[0]->parts->find<Shards>()->shards();
    for (const auto& names : shards->units()) {
      std::vector<int64_t> counts;
      for (const std::string& name : names) {
        counts.push_back(runs[0]->model->named_parameters()[name].numel());
      }
      part += ShardLayout(counts, nodes.per_node).part_elements() * 4;
    }
    const int64_t norms = kSteps * norm_bytes(*runs[0], nodes.per_node);  // finite_check
    CHECK(bytes("node", "reduce_scatter") == kSteps * (nodes.per_node - 1) * part);
    CHECK(bytes("node", "all_gather") == kSteps * (nodes.per_node - 1) * part + norms);
    CHECK(bytes("between nodes", "all_reduce") == kSteps * 2 * (nodes.nodes - 1) * part / nodes.nodes);
    CHECK(bytes("", "reduce_scatter") + bytes("", "all_gather") + bytes("", "all_reduce") == 0);
  }
}

TEST_CASE("checkpoints of runs over nodes are those of any other", "[shards][nodes][resume]") {
  const auto optimizers = shared_optimizers();
  struct Kind {
    Nodes nodes;
    bool is_sharded;
    ShardGroup over;
    Sharded what;
  };
  const std::vector<Kind> kinds = {{{2, 2}, true, ShardGroup::node, Sharded::parameters},
                                   {{2, 2}, true, ShardGroup::node, Sharded::gradients},
                                   {{1, 1}, false, ShardGroup::world, Sharded::state},
                                   {{3, 1}, true, ShardGroup::world, Sharded::parameters},
                                   {{2, 3}, true, ShardGroup::node, Sharded::state}};
  const auto runs_in = [&](const Kind& kind, const std::string& folder) {
    const auto way = kind.is_sharded ? sharded(kind.what, kind.over) : Adds(data_parallel);
    return runs_of(
        optimizers.front(), {}, kind.nodes.ranks(),
        [&](SmallRun& run) {
          if (kind.nodes.ranks() > 1) way(run);
          run.session->use(Checkpoints(CheckpointsOptions(folder).every(3).synchronous(true)));
        },
        kind.nodes.per_node);
  };
  for (const Kind& from : kinds) {
    const TemporaryFolder folder;
    Runs saved = runs_in(from, folder.path());
    for (int step = 0; step < 3; ++step) REQUIRE(step_all(saved) == "");
    for (const Kind& to : kinds) {
      CAPTURE(from.nodes.nodes, from.nodes.per_node, to.nodes.nodes, to.nodes.per_node, to.is_sharded);
      Runs resumed = runs_in(to, folder.path());
      const CapturedStderr quiet;
      REQUIRE(on_all(resumed, [](SmallRun& run) {
                require(run.session->resume() == 3, "nothing was resumed");
              }) == "");
      REQUIRE(model_difference(saved, resumed) == "");
      REQUIRE(on_all(resumed, [](SmallRun& run) { run.finish(); }) == "");
    }
  }
}

TEST_CASE("Shards over nodes says what it needs", "[shards][nodes][errors]") {
  const auto optimizers = shared_optimizers();
  detail::Connection connection = detail::connect_in_process(1).front();
  connection.ranks_per_node = 0;  // nodes differ
  const auto world = std::make_shared<Communicator>(std::move(connection), CommunicatorOptions());
  SmallRun run(optimizers.front(), {}, /*dropout=*/0, world, /*own_random=*/false);
  CHECK_THROWS_WITH(run.session->use(Shards(ShardsOptions().over(ShardGroup::node))),
                    ContainsSubstring("so that all nodes need as many ranks, which follow one another") &&
                        ContainsSubstring("or leave over(ShardGroup::node) out"));
  Runs runs = runs_of(
      optimizers.front(), {}, 4,
      [](SmallRun& run) {
        const bool is_first = run.world->rank() == 0;
        sharded(Sharded::gradients, is_first ? ShardGroup::world : ShardGroup::node)(run);
      },
      2);
  const CapturedStderr quiet;
  CHECK_THAT(step_all(runs), ContainsSubstring("on each node"));
}

}  // namespace pacer::testing
