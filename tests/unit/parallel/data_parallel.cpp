// Data parallelism over threads: equal, to the bit, to one process that takes the shards in rank order, with
// every pair of hooks; identical replicas; and every way in which ranks can differ.
#include <algorithm>
#include <array>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/parallel/shard_reference.h"
#include "support/samples.h"
#include "support/session/hook_pairs.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace {

// The runs of all ranks, made one after the other: threads share LibTorch's generators.
std::vector<std::unique_ptr<SmallRun>> runs_of(
    const RegisteredOptimizer& optimizer, const std::vector<RegisteredHook>& hooks, int world_size,
    const DataParallelOptions& options = DataParallelOptions().bucket_bytes(600).first_bucket_bytes(100)) {
  std::vector<std::unique_ptr<SmallRun>> runs;
  for (const auto& world : Communicator::in_process(world_size)) {
    runs.push_back(std::make_unique<SmallRun>(optimizer, hooks, /*dropout=*/0, world, /*own_random=*/false));
    runs.back()->session->use(DataParallel(options));
  }
  return runs;
}

std::string step_each(std::vector<std::unique_ptr<SmallRun>>& runs) {
  return first_of(
      run_ranks(static_cast<int>(runs.size()), [&](int rank) { runs[static_cast<size_t>(rank)]->step(); }));
}

RegisteredOptimizer optimizer_named(const std::vector<RegisteredOptimizer>& all, const std::string& name) {
  return *std::find_if(all.begin(), all.end(), [&](const auto& o) { return o.name == name; });
}

}  // namespace

TEST_CASE("with every pair of hooks, ranks equal one process that takes the shards in rank order",
          "[session][data_parallel]") {
  const auto optimizers = all_optimizers();
  // Pairs take turns with them; in a long run every pair has all three.
  const std::array<const char*, 3> names = {"FusedAdamW", "FusedAdamW bf16 remainder", "SGD"};
  size_t turn = 0;
  int world_size = 1;
  for (const auto& pair : hooks_and_pairs(/*one_in=*/7, /*first=*/4)) {
    ++turn;
    if (differ_by_rank(pair)) continue;
    world_size = world_size % 4 + 1;
    for (size_t i = 0; i < names.size(); ++i) {
      if ((turn + i) % names.size() != 0 && !wants_long_tests()) continue;
      const std::string name = names[i];
      const RegisteredOptimizer optimizer = optimizer_named(optimizers, name);
      INFO(name << ", " << names_of(pair) << ", " << world_size << " ranks");
      auto runs = runs_of(optimizer, pair, world_size);
      SmallRun reference(optimizer, pair, /*dropout=*/0, Communicator::alone(at::kCPU), false);
      reference.shards = world_size;
      reference.session->use(std::make_shared<ShardReference>(reference.model, world_size));
      for (int step = 0; step < 6; ++step) {
        REQUIRE(step_each(runs) == "");
        reference.step();
        REQUIRE(replica_difference(*runs[0], reference) == "");
        for (auto& run : runs) REQUIRE(replica_difference(*runs[0], *run) == "");
        REQUIRE(runs[0]->session->progress().tokens == reference.session->progress().tokens);
      }
    }
  }
}

TEST_CASE("every optimizer trains on ranks, and replicas stay identical", "[session][data_parallel]") {
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    INFO(optimizer.name);
    std::vector<RegisteredHook> hooks;
    for (const RegisteredHook& hook : all_hooks()) {
      const auto used = {"accumulation", "clipping", "layer drop", "curriculum", "sampler"};
      if (std::count(used.begin(), used.end(), hook.name)) hooks.push_back(hook);
    }
    auto runs = runs_of(optimizer, hooks, 3);
    for (int step = 0; step < 8; ++step) {
      REQUIRE(step_each(runs) == "");
      for (auto& run : runs) REQUIRE(replica_difference(*runs[0], *run) == "");
    }
  }
}

}  // namespace pacer::testing
