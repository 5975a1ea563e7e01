// The training loop: a model, an optimizer, and a Session with hooks around a loop of ten lines.
#include "training.h"

#include "convergence/arms/teaching.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/utils.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/optimizers/onebit_lamb.h>
#include <pacer/schedulers/learning_rate.h>
#include <pacer/session/session.h>

#include "convergence/arms/arms.h"
#include "convergence/arms/fine_tuning.h"
#include "convergence/model/gpt.h"
#include "convergence/model/piped_gpt.h"
#include "convergence/text/text_batches.h"
#include "memory_meter.h"

namespace convergence {
namespace {

constexpr double kFinalRate = 0.1;  // of the peak learning rate
constexpr int64_t kCheckpointsKept = 2;

// Lets cuBLAS take its workspaces, one for each of the threads of forward and backward. They stay for the
// life of the process, so the memory of the first run would count them, and that of no other.
void take_workspaces(torch::Device device) {
  if (!device.is_cuda()) return;
  const auto weight = torch::ones({16, 16}, torch::TensorOptions(device).requires_grad(true));
  torch::mm(weight, weight).sum().backward();
}

GptConfig gpt_config(const Settings& settings, bool fused = false) {
  return {settings.layers, settings.width, settings.heads, settings.sequence, fused};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Arm& arm, const Settings& settings,
                                                        const std::shared_ptr<pacer::Communicator>& world,
                                                        Gpt& model,
                                                        const pacer::NamedParameters& parameters) {
  OptimizerRecipe recipe{{}, {}, settings, model->position_weight(), model->byte_weight(), world};
  for (const auto& parameter : parameters.values()) {
    if (!parameter.requires_grad()) continue;
    (parameter.dim() >= 2 ? recipe.decayed : recipe.undecayed).push_back(parameter);
  }
  return arm.make_optimizer(recipe);
}

// By tokens, so that short sequences do not move it faster.
pacer::LearningRateSchedule schedule(const Arm& arm, const Settings& settings) {
  const auto warm_up = pacer::LearningRateScheduleOptions(settings.warmup_steps());
  if (arm.has(Method::stable_decay) && arm.has(Method::average)) return pacer::constant_schedule(warm_up);
  auto options =
      pacer::LearningRateScheduleOptions(warm_up).total_tokens(settings.tokens).end_factor(kFinalRate);
  if (!arm.has(Method::stable_decay)) return pacer::warmup_cosine(options);
  const double decaying = std::round(settings.decay_share * static_cast<double>(settings.tokens));
  return pacer::warmup_stable_decay(options.decay_tokens(static_cast<int64_t>(decaying)));
}

// Of the batch that comes next. A step of a batch that grew takes several.
int64_t batch_number(const Arm& arm, const Settings& settings, const pacer::Progress& progress) {
  if (!arm.has(Method::growing_batch)) return progress.step;
  return progress.tokens / settings.tokens_per_step() + progress.micro_step;
}

// Each rank looks at every world_size-th batch. All then add up the losses of all batches in the batches'
// order: every rank gets the same number, and it is the one that a single process would get. All have as many
// forward passes, because shards gather parameters in them; a rank without a batch looks at the last one.
double validation_loss(const std::vector<ByteBatch>& batches, pacer::Communicator& world, Gpt& model) {
  const auto count = static_cast<int64_t>(batches.size()), ranks = int64_t{world.world_size()};
  const int64_t share = (count + ranks - 1) / ranks;
  const auto own = at::zeros({share}, at::kDouble), all = at::empty({ranks * share}, at::kDouble);
  for (int64_t round = 0; round < share; ++round) {
    const int64_t i = std::min(round * ranks + world.rank(), count - 1);
    const auto& [x, y] = batches[static_cast<size_t>(i)];
    own[round] = next_byte_loss(model->forward(x.to(world.device())), y.to(world.device())).item<double>();
  }
  world.all_gather_host(all, own).wait();
  double sum = 0.0, sequences = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const auto size = static_cast<double>(batches[static_cast<size_t>(i)].first.size(0));
    sum += size * all[i % ranks * share + i / ranks].item<double>();
    sequences += size;
  }
  return sum / sequences;
}

}  // namespace

int64_t count_parameters(const Settings& settings) {
  int64_t count = 0;
  for (const auto& parameter : Gpt(gpt_config(settings))->parameters()) {
    count += parameter.numel();
  }
  return count;
}

std::filesystem::path weights_file(const std::filesystem::path& folder) {
  return folder / "weights.safetensors";
}

Run train(const RunPlan& plan, const Machine& machine, const Run& stored, RunObserver* observer) {
  const Arm& arm = find_arm(plan.arm);
  const Settings& settings = plan.settings;
  const Corpus& corpus = plan.corpus;
  const uint64_t seed = plan.seed;
  pacer::Communicator& world = *machine.world;
  const torch::Device device = world.device();
  take_workspaces(device);
  const auto memory = std::make_shared<MemoryMeter>(device);
  const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, memory);
  torch::manual_seed(seed);
  // On the CPU first: the same weights for every device.
  Gpt model(gpt_config(settings, arm.has(Method::fused_layers)));
  if (!plan.base_weights.empty()) begin_from(plan.base_weights, arm, settings, &model);
  int64_t parameters = 0;
  for (const auto& parameter : model->parameters()) {
    if (parameter.requires_grad()) parameters += parameter.numel();
  }
  const auto validation = validation_batches(corpus, settings);
  std::optional<PipedGpt> piped;
  if (arm.has(Method::pipeline)) {
    piped.emplace(model, settings, validation, machine.world);
  } else {
    model->to(device);
  }
  const auto optimizer =
      make_optimizer(arm, settings, machine.world, model,
                     piped ? piped->pipeline().named_parameters() : model->named_parameters());

  Run run;
  run.arm = plan.name();
  run.seed = seed;
  run.processes = settings.processes;
  run.parameters = parameters;
  const auto curve = std::make_shared<TrainingCurve>(settings, memory, &run, observer);

  pacer::Session session(*model, *optimizer, machine.world);
  session.use(pacer::LearningRate(schedule(arm, settings))).use(curve);
  if (settings.clip > 0.0) {
    session.use(pacer::GradientClipping(
        pacer::GradientClippingOptions(settings.clip).by_previous_norm(settings.clip_by == "previous")));
  }
  if (piped) session.use(piped->pipeline());
  add_methods(arm, settings, model->blocks(), seed, &session);
  if (arm.has(Method::largest_update)) session.use(LargestUpdate(&run.largest_update));
  if (settings.checkpoint_every > 0) {
    session.use(pacer::Checkpoints(pacer::CheckpointsOptions((plan.folder / "checkpoints").string())
                                       .every(settings.checkpoint_every)
                                       .keep(kCheckpointsKept)));
    if (settings.resume && session.resume()) curve->continue_run(stored, session.progress().tokens);
  }
  // The first forward and backward pay for libraries being loaded and memory pools being filled. That is no
  // arm's cost, so it happens before the clock starts; nothing is learned from it. A pipeline has no such
  // pass.
  if (!piped) {
    session.prewarm([&] {
      const auto [x, y] = training_batch(corpus, settings, seed, 0, world.rank());
      return next_byte_loss(model->forward(x.to(device)), y.to(device));
    });
  }
  curve->start_clock();

  const pacer::Progress& progress = session.progress();
  const auto validate_when_due = [&] {
    if (!curve->validation_is_due(progress.tokens)) return;
    const double loss = session.evaluate([&] {
      return piped ? piped->validation_loss(validation) : validation_loss(validation, world, model);
    });
    curve->add_validation(progress.tokens, loss);
  };
  Settings whole_batches = settings;
  whole_batches.processes = 1;
  validate_when_due();
  while (progress.tokens < settings.tokens) {
    if (piped) {
      piped->step(session, training_batch(corpus, whole_batches, seed, progress.step, /*rank=*/0));
    } else {
      const auto batch =
          training_batch(corpus, settings, seed, batch_number(arm, settings, progress), world.rank());
      auto [x, y] = session.begin(batch.first, batch.second);
      session.backward(next_byte_loss(model->forward(x), y));
    }
    session.step();
    validate_when_due();
  }
  session.finish();
  if (const auto* onebit = dynamic_cast<const pacer::OneBitOptimizer*>(optimizer.get())) {
    run.frozen_at = onebit->frozen_at().value_or(0);
  }
  if (const auto* lamb = dynamic_cast<const pacer::OneBitLamb*>(optimizer.get())) {
    for (const auto& item : model->named_parameters()) {
      const torch::Tensor& parameter = item.value();
      run.tensors.push_back({item.key(), parameter.numel(), lamb->coefficient(parameter),
                             lamb->factor(parameter), lamb->momentum_scale(parameter)});
    }
  }
  if (plan.is_base) {
    if (world.rank() == 0) pacer::save_weights(*model, weights_file(plan.folder).string());
    world.barrier();
  }
  run.finished = true;
  return run;
}

}  // namespace convergence
