// F1: a run in which one rank is killed or stopped at a chosen point, and its resumption. The run prints the
// hash of its last state, which must be that of a run without faults.
#include <pacer/files/checksum.h>

#include "fault_points.h"
#include "optimizers.h"
#include "scenario.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace {

void play(const Player& player) {
  const std::string point = fault_point(player);
  const auto fault = [&player] { suffer(player); };
  if (point == "rendezvous") fault();
  const auto world = join_with_fault(player, point, fault);
  if (point == "after_rendezvous") fault();

  std::vector<RegisteredHook> hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    if (hook.name == "accumulation" || hook.name == "clipping" || hook.name == "sampler")
      hooks.push_back(hook);
  }
  const RegisteredOptimizer optimizer =
      optimizer_named(player.has("optimizer") ? player.text("optimizer") : "FusedAdamW");
  SmallRun run(optimizer, hooks, /*dropout=*/0.1, world);
  if (player.has("shards")) {
    const bool by_nodes = player.options().ranks_per_node() > 0;
    const auto options = ShardsOptions().over(by_nodes ? ShardGroup::node : ShardGroup::world);
    run.session->use(player.text("shards") == "parameters" ? Shards(run.model->stack, options)
                                                           : Shards(ShardsOptions(options).unit_bytes(600)));
  } else {
    run.session->use(DataParallel(DataParallelOptions().bucket_bytes(600).first_bucket_bytes(100)));
  }
  run.session->use(FaultHook(point, fault))
      .use(Checkpoints(
          CheckpointsOptions(player.text("folder")).every(2).timeout(player.options().timeout())));
  const auto resumed = run.resume();
  say("resumed " + std::to_string(resumed.value_or(0)));
  while (run.session->progress().step < 6) run.step();
  run.finish();
  Checksum sum;
  const auto whole = run.session->whole_parameters();
  const auto state = run.state();
  for (const auto& item : state.model) {
    const Tensor tensor = item.second.cpu();
    sum.add(tensor.const_data_ptr(), static_cast<size_t>(tensor.numel()) * tensor.element_size());
  }
  say("hash " + sum.hex());
}

const AddScenario kFaults("faults", play);

}  // namespace
}  // namespace pacer::testing
