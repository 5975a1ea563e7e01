// Adapters and weights in 4 bits in a Session: with every hook, with ranks, shards and checkpoints they train
// as other parameters do, and what is frozen is neither sent nor counted nor changed.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include <pacer/schedulers/detail/checkpoint_files.h>
#include <pacer/schedulers/shards.h>

#include "support/catch.h"
#include "support/mistakes.h"
#include "support/shard_reference.h"
#include "support/shard_runs.h"
#include "support/temporary_folder.h"

namespace pacer::testing::lora_session {
namespace {

using shards::on_all;
using shards::Runs;
using shards::runs_of;
using shards::step_all;

// A model with adapters, and another hook.
struct Pair {
  std::vector<RegisteredHook> hooks;
  std::string name;
  bool is_mixed;  // 16 and 32 bits in one model
};
std::vector<Pair> adapted_with_hooks() {
  std::vector<Pair> pairs;
  for (const RegisteredHook& model : adapted_models()) {
    const bool is_mixed = model.name.find("bf16") != std::string::npos;
    pairs.push_back({{model}, model.name, is_mixed});
    for (const RegisteredHook& hook : all_hooks()) {
      if (hook.kind != "layers") pairs.push_back({{model, hook}, names_of({model, hook}), is_mixed});
    }
  }
  return pairs;
}

RegisteredOptimizer optimizer_called(const std::string& name) {
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    if (optimizer.name == name) return optimizer;
  }
  throw Error("no optimizer is called " + name);
}

bool is_in(const std::vector<RegisteredHook>& hooks, const std::string& kind) {
  return std::any_of(hooks.begin(), hooks.end(), [&](const auto& hook) { return hook.kind == kind; });
}

// All that is not trained: frozen parameters, codes, scales.
NamedTensors frozen_of(SmallModel& model) {
  NamedTensors frozen;
  for (const auto& item : model->named_parameters()) {
    if (!item.value().requires_grad()) frozen[item.key()] = item.value().detach().clone();
  }
  for (const auto& item : model->named_buffers()) frozen[item.key()] = item.value().clone();
  return frozen;
}

std::string replica_difference(SmallRun& a, SmallRun& b) {
  auto x = a.state(), y = b.state();
  for (auto* state : {&x, &y}) {
    state->rank_optimizer.clear();
    state->session.erase("hook/data_parallel/bucket_order");
  }
  return first_difference(x, y);
}

}  // namespace

TEST_CASE("with every hook adapters train, are resumed to the bit and keep all else as it was",
          "[lora][session]") {
  const auto optimizers = all_optimizers();
  size_t next = 0;
  for (const Pair& pair : adapted_with_hooks()) {
    // Groups of both 16 and 32 bits are for some optimizers only.
    const RegisteredOptimizer optimizer =
        pair.is_mixed ? optimizer_called("FusedAdamW") : optimizers[next++ % optimizers.size()];
    INFO(optimizer.name << ", " << pair.name);
    SmallRun run(optimizer, pair.hooks), reversed(optimizer, {pair.hooks.rbegin(), pair.hooks.rend()});
    SmallRun resumed(optimizer, pair.hooks);
    const NamedTensors frozen = frozen_of(run.model);
    REQUIRE(run.model->named_parameters().size() == frozen.size() + 7 - run.model->named_buffers().size());
    const NamedTensors first = run.state().model;
    for (int step = 0; step < 3; ++step) {
      run.step();
      reversed.step();
      REQUIRE(std::isfinite(run.loss));
    }
    REQUIRE(first_difference(run.state(), reversed.state()) == "");
    resumed.step();
    resumed.load(run.state());
    REQUIRE(first_difference(run.state(), resumed.state()) == "");
    for (int step = 0; step < 3; ++step) {
      run.step();
      resumed.step();
      REQUIRE(first_difference(run.state(), resumed.state()) == "");
    }
    REQUIRE(first_difference(frozen_of(run.model), frozen) == "");
    const NamedTensors last = run.state().model;
    for (const auto& item : nn::trainable(*run.model)) {
      REQUIRE_FALSE(same_bits(last.at(item.key()), first.at(item.key())));
    }
  }
}

TEST_CASE("a gradient of an adapter that is not finite changes nothing but the attempt", "[lora][session]") {
  for (const Pair& pair : adapted_with_hooks()) {
    INFO(pair.name);
    SmallRun run(optimizer_called("FusedAdamW"), pair.hooks);
    for (int step = 0; step < 2; ++step) run.step();
    const auto before = run.state();
    run.step([](SmallModel& model) {
      Tensor& gradient = model->blocks[2]->adapter("default")->A.mutable_grad();
      if (!gradient.defined()) gradient = torch::zeros_like(model->blocks[2]->adapter("default")->A);
      gradient[2][kWidth - 1] = -INFINITY;
    });
    REQUIRE(run.session->skipped_steps() == 1);
    REQUIRE(first_difference(before.model, run.state().model) == "");
    run.step();
    REQUIRE(first_difference(before.model, run.state().model) != "");
  }
}

TEST_CASE("with every hook, ranks with adapters equal one process that takes the shards in rank order",
          "[lora][session][data_parallel]") {
  int world_size = 2;
  size_t next = 0;
  for (const Pair& pair : adapted_with_hooks()) {
    if (is_in(pair.hooks, "sampler")) continue;
    world_size = 5 - world_size;
    const char* names[] = {"FusedAdamW", "FusedLamb", "SGD", "FusedAdamW bf16 remainder"};
    const RegisteredOptimizer optimizer = optimizer_called(pair.is_mixed ? names[0] : names[next++ % 4]);
    INFO(optimizer.name << ", " << pair.name << ", " << world_size << " ranks");
    Runs runs = runs_of(optimizer, pair.hooks, world_size, shards::data_parallel);
    SmallRun reference(optimizer, pair.hooks, /*dropout=*/0, Communicator::alone(at::kCPU), false);
    reference.shards = world_size;
    reference.session->use(std::make_shared<ShardReference>(reference.model, world_size));
    for (int step = 0; step < 4; ++step) {
      REQUIRE(step_all(runs) == "");
      reference.step();
      REQUIRE(replica_difference(*runs[0], reference) == "");
      for (auto& run : runs) REQUIRE(replica_difference(*runs[0], *run) == "");
    }
  }
}

TEST_CASE("with every hook, Shards trains adapters as DataParallel, to the bit",
          "[lora][shards][session][data_parallel]") {
  const auto optimizers = shards::shared_optimizers();
  int world_size = 2;
  size_t next = 0;
  for (const Pair& pair : adapted_with_hooks()) {
    const bool accumulates = is_in(pair.hooks, "accumulation");
    world_size = 5 - world_size;
    const RegisteredOptimizer optimizer =
        pair.is_mixed ? optimizer_called("FusedAdamW") : optimizers[next++ % optimizers.size()];
    Runs wanted = runs_of(optimizer, pair.hooks, world_size, shards::data_parallel);
    std::vector<NamedTensors> models;
    for (int step = 0; step < 3; ++step) {
      REQUIRE(step_all(wanted) == "");
      models.push_back(shards::models_of(wanted).front());
    }
    for (const Sharded what : {Sharded::state, Sharded::gradients, Sharded::parameters}) {
      // Added over ranks in every micro-step, gradients add up in another order.
      if (what == Sharded::gradients && accumulates) continue;
      INFO(optimizer.name << ", " << pair.name << ", " << world_size << " ranks, " << shards::name_of(what));
      Runs found = runs_of(optimizer, pair.hooks, world_size, [&](SmallRun& run) {
        if (what != Sharded::parameters) return shards::sharded(what)(run);
        run.session->use(Shards(run.model->stack, ShardsOptions().reduce_every_micro_step(!accumulates)));
      });
      for (const NamedTensors& model : models) {
        REQUIRE(step_all(found) == "");
        for (const NamedTensors& other : shards::models_of(found)) {
          REQUIRE(first_difference(model, other) == "");
        }
      }
    }
  }
}

}  // namespace pacer::testing::lora_session
