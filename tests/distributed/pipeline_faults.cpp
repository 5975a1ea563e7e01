// A run of a pipeline in which one rank is killed or stopped at a chosen point, and its resumption. The run
// prints a hash of the last state of all ranks, which must be that of a run without faults.
#include "fault_points.h"
#include "pipeline_trainer.h"

namespace pacer::testing::pipelines {
namespace {

void play(const Player& player) {
  const std::string point = fault_point(player);
  const auto fault = [&player] { suffer(player); };
  const auto world = join_with_fault(player, point, fault);
  int64_t step = 0, blocks = 0;
  // In the third of this rank's passes through a block in its step.
  const auto at = [&](const char* place) {
    if (point == place && step == kFaultStep && ++blocks == 3) fault();
  };
  Task task;
  task.schedule = schedule_named(player.text("schedule"));
  task.after_block = [&](Tensor x) {
    at("in_forward");
    x.register_hook([&](const Tensor&) { at("in_backward"); });
    return x;
  };
  PipelineTrainer trainer(task, Grid(world, player.number("stages", player.world_size)));
  trainer.session()
      .use(FaultHook(point, fault))
      .use(Checkpoints(
          CheckpointsOptions(player.text("folder")).every(2).timeout(player.options().timeout())));
  step = trainer.resume();
  say("resumed " + std::to_string(step));
  for (; step < 6; ++step) trainer.step();
  trainer.session().finish();
  std::string own;
  for (const auto& [name, of_tensor] : trainer.checksums()) own += name + ' ' + of_tensor + '\n';
  Checksum sum;
  for (const std::string& text : world->exchange(own)) sum.add(text.data(), text.size());
  say("hash " + sum.hex());
}

const AddScenario kFaults("faults_in_pipeline", play);

}  // namespace
}  // namespace pacer::testing::pipelines
