// Pipelines of processes: beside one process, or data-parallel ones, that train the whole model with
// accumulation; resumed by other numbers of stages; and what ranks that differ say before they send anything.
#include <algorithm>
#include <cmath>

#include "pipeline_trainer.h"

namespace pacer::testing::pipelines {
namespace {

// Tied weights add their gradients in another order, and AdamW divides what rounding makes of that by the
// gradient's own size. Ten steps of 0.01 come 1.4e-6 apart on GPUs and 1.2e-7 on CPUs; a stage whose part is
// missing would be a whole step away.
constexpr double kTiedBound = 1e-5;

// Each rank trains a stage, and beside it the whole model with the ranks that have the same stage.
void train(const Player& player) {
  const auto world = join_in_order(player);
  const Grid grid(world, 2);
  for (const char* name : {"gpipe", "1f1b", "zero-bubble", "interleaved"}) {
    for (const bool is_tied : {false, true}) {
      Task task;
      task.schedule = schedule_named(name);
      task.is_tied = is_tied;
      PipelineTrainer piped(task, grid), whole(task, grid.replicas());
      double farthest = 0;
      for (int64_t step = 0; step < player.number("steps"); ++step) {
        const double loss = piped.step(), wanted = whole.step();
        expect(std::abs(loss - wanted) < 1e-6 * wanted, "the loss ", wanted, " in step ", step, ", not ",
               loss);
        expect(whole.session().gradient_norm() > kMaxNorm, "a gradient to clip in step ", step);
        const auto of_whole = whole.weights();
        for (const auto& [tensor, value] : piped.weights()) {
          const Tensor& other = of_whole.at(tensor);
          expect(is_tied || value.equal(other), "no difference from the whole model in ", name,
                 " after step ", step, ", but ", tensor, " differs");
          farthest = std::max(farthest, (value - other).abs().max().item<double>());
        }
      }
      expect(farthest < kTiedBound, "tied weights to be near those of the whole model, not ", farthest,
             " away");
      piped.session().finish();
      whole.session().finish();
      if (world->rank() == 0 && is_tied) {
        say(detail::concatenate(name, ": tied weights are ", farthest, " away"));
      }
    }
  }
}

void say_state(const PipelineTrainer& trainer, int64_t step) {
  for (const auto& [name, sum] : trainer.checksums()) {
    say("state " + std::to_string(step) + " " + name + " " + sum);
  }
}

// Goes on from the newest checkpoint of a folder, if there is one, to step `steps`, with pipelines of
// `stages` ranks, or where that is 0 without. Says the state after the resumption and each step.
void train_part(const Player& player) {
  const auto world = join_in_order(player);
  Task task;
  task.is_tied = player.has("tied");
  if (player.has("optimizer")) task.optimizer = optimizer_named(player.text("optimizer"));
  std::unique_ptr<PipelineTrainer> trainer;
  if (const int stages = player.number("stages")) {
    task.schedule = schedule_named(player.text("schedule"));
    trainer = std::make_unique<PipelineTrainer>(task, Grid(world, stages));
  } else {
    trainer = std::make_unique<PipelineTrainer>(task, world);
  }
  trainer->session().use(Checkpoints(CheckpointsOptions(player.text("folder")).every(100)));
  int64_t step = trainer->resume();
  say("resumed " + std::to_string(step));
  if (step > 0) say_state(*trainer, step);
  while (step < player.number("steps")) {
    trainer->step();
    say_state(*trainer, ++step);
  }
  trainer->session().finish();
}

// In what one rank may differ from the others.
const std::map<std::string, std::function<void(Task&)>> kMistakes = {
    {"micro-batches", [](Task& task) { task.schedule.micro_batches = task.micro_batches = 8; }},
    {"schedule", [](Task& task) { task.schedule = schedule_named("gpipe"); }},
    {"chunks", [](Task& task) { task.schedule = schedule_named("interleaved"); }},
    {"cut",
     [](Task& task) {
       task.options.cut({0, 3, 8});
     }},
    {"shape",
     [](Task& task) {
       task.change_model = [](LanguageModel& model) {
         model->head->weight.set_data(torch::zeros({kWords + 1, kWidth}));
       };
     }},
    {"batch", [](Task&) {}},
    {"rows", [](Task&) {}},
};

std::string type_of(const std::exception& error) {
  if (dynamic_cast<const CommunicationError*>(&error) != nullptr) return "CommunicationError";
  return dynamic_cast<const InvalidArgument*>(&error) != nullptr ? "InvalidArgument" : "another error";
}

// Activations, gradients, and values of parameters. Tests of the connections themselves count as agreement.
int64_t payloads(const Communicator& world) {
  int64_t calls = 0;
  for (const Traffic& traffic : world.traffic()) {
    if (traffic.operation == "send" || traffic.operation == "receive") calls += traffic.calls;
  }
  return calls;
}

// One mistake of the last rank after the other, in a world of its own each. Says what every rank gets for it.
void differ(const Player& player) {
  for (const auto& [name, make] : kMistakes) {
    Player met = player;
    met.arguments["file"] += "-" + name;
    const auto world = join_in_order(met);
    const bool is_other = player.rank == player.world_size - 1;
    Task task;
    if (is_other) make(task);
    try {
      PipelineTrainer trainer(task, Grid(world, 2));
      trainer.step([&, mistake = name](Tensor& tokens) {
        if (is_other && mistake == "batch") tokens[0][0] = (tokens[0][0] + 1) % kWords;
        if (is_other && mistake == "rows") tokens = torch::cat({tokens, tokens[0].unsqueeze(0)});
      });
      say(name + ": no error");
    } catch (const std::exception& error) {
      say(name + ": " + type_of(error) + ": " + error.what());
    }
    say(name + " payloads: " + std::to_string(payloads(*world)));
  }
}

// What stages may be like: 8-bit layers, of which a rank has some; nothing to train on the first or the last
// rank. Beside the whole model, as above.
void train_parts(const Player& player) {
  const auto world = join_in_order(player);
  const Grid grid(world, 2);
  const auto only = [](const char* beginning) {
    return [=](LanguageModel& model) {
      for (const auto& item : model->named_parameters()) {
        Tensor(item.value()).set_requires_grad(item.key().rfind(beginning, 0) == 0);
      }
    };
  };
  std::map<std::string, Task> tasks;
  tasks["fp8"].fp8 = true;
  tasks["fp8"].rows = 4;  // of 12 tokens: 8-bit products need multiples of 16
  tasks["fp8"].micro_batches = 2;
  tasks["fp8"].schedule = one_f_one_b(2);
  tasks["the first stage is frozen"].change_model = only("blocks.7");
  tasks["only the embedding is trained"].change_model = only("embedding");
  tasks["an empty stage"].options.cut({0, 8, 8});
  for (const auto& [name, task] : tasks) {
    PipelineTrainer piped(task, grid), whole(task, grid.replicas());
    for (int64_t step = 0; step < player.number("steps"); ++step) {
      const double loss = piped.step(), wanted = whole.step();
      expect(std::abs(loss - wanted) < 1e-6 * wanted, name, ": the loss ", wanted, " in step ", step,
             ", not ", loss);
      const auto of_whole = whole.weights();
      for (const auto& [tensor, value] : piped.weights()) {
        expect(value.equal(of_whole.at(tensor)), name, ": no difference from the whole model after step ",
               step, ", but ", tensor, " differs");
      }
    }
    piped.session().finish();
    whole.session().finish();
  }
}

const AddScenario kParts("train_pipeline_parts", train_parts);
const AddScenario kTrain("train_pipelines", train);
const AddScenario kPart("train_pipeline_part", train_part);
const AddScenario kDiffer("pipeline_differences", differ);

}  // namespace
}  // namespace pacer::testing::pipelines
