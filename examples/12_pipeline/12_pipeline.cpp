// Pipeline parallelism: the blocks of a byte-level GPT lie in stages on different ranks, and the
// micro-batches of each step are in flight between them. What to look at: which rank has which blocks, and a
// loss that is that of one rank with the whole model (--compare), whatever the schedule. The loop differs in
// one call: pipeline.step takes the place of begin, forward and backward.
//
//   12_pipeline                                      two processes here, one GPU each where there are GPUs
//   12_pipeline --schedule interleaved --compare     two stages a rank; then the same by one rank
//   12_pipeline --stages 2 --pipelines 2             four ranks: two replicas of each stage
//   12_pipeline --checkpoints run/pipeline           start it again, even with other stages: it goes on
//   torchrun --no-python --nproc-per-node 2 12_pipeline
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/utils.h>

#include <pacer/pacer.h>

#include "byte_gpt.h"
#include "support/command_line.h"
#include "support/processes.h"
#include "support/program.h"

namespace {

using byte_gpt::Text;
using torch::Tensor;
using World = std::shared_ptr<pacer::Communicator>;

constexpr int64_t kBatch = 32;  // sequences of all pipelines together
constexpr int64_t kSteps = 120, kMeasureEvery = 40, kSaveEvery = 20;

struct Options {
  int stages = 2, pipelines = 1;
  pacer::PipelineSchedule schedule;
  int64_t steps = kSteps;
  std::string checkpoints;  // folder; empty: none are written
  bool compare = false;
};

// Rank 0 says what each rank has.
void introduce(const pacer::Pipeline& pipeline, const World& world) {
  int64_t parameters = 0;
  for (const auto& item : pipeline.named_parameters()) parameters += item.value().numel();
  std::string line = "stage " + std::to_string(pipeline.grid().stage()) + ", blocks";
  for (int64_t chunk = 0; chunk < pipeline.schedule().chunks; ++chunk) {
    const auto [first, end] = pipeline.blocks_of(chunk);
    for (int64_t block = first; block < end; ++block) line += " " + std::to_string(block);
  }
  const auto lines = world->exchange(line + ", " + std::to_string(parameters) + " parameters");
  if (world->rank() != 0) return;
  for (size_t rank = 0; rank < lines.size(); ++rank) {
    std::printf("rank %zu: %s\n", rank, lines[rank].c_str());
  }
}

pacer::FusedAdamWOptions recipe() { return pacer::FusedAdamWOptions(3e-3).weight_decay(0.1); }

// What both ways of training share. `measure` returns the loss on held-out text.
void use_hooks(pacer::Session& session, pacer::EpochSampler sampler, const std::function<double()>& measure) {
  session.use(pacer::GradientClipping(1.0))
      .use(pacer::LearningRate(pacer::warmup_cosine({kSteps / 10, kSteps})))
      .use(sampler)
      .use(pacer::Validation(kMeasureEvery, measure));
}

// Returns the loss on held-out text after the last step.
double train_pipeline(const World& world, const Options& options, const Text& text) {
  const pacer::Grid grid(world, options.stages);
  auto model = byte_gpt::make_gpt();
  const pacer::Pipeline pipeline(
      *model, model->blocks, &byte_gpt::BlockImpl::forward, grid, options.schedule,
      pacer::PipelineOptions().first({"bytes", "positions"}).last({"norm", "head"}));
  introduce(pipeline, world);
  pacer::FusedAdamW optimizer(pipeline.named_parameters(), recipe());
  pacer::EpochSampler sampler(text.size(), /*seed=*/1, *grid.replicas());  // a part for each pipeline
  pacer::Session session(*model, optimizer, world);

  const auto first = [&](const Tensor& bytes) { return model->embed(bytes); };
  const auto last = [&](const Tensor& x, const Tensor& targets) { return model->loss(x, targets); };
  double loss = 0;
  const auto measure = [&] {
    const auto [x, y] = text.held_out(kBatch);
    loss = pipeline.evaluate(x, y, first, last).item<double>();
    if (world->rank() == 0) {
      std::printf("after %lld steps: %.4f nats per byte of held-out text\n",
                  static_cast<long long>(session.progress().step), loss);
    }
    return loss;
  };
  session.use(pipeline);
  use_hooks(session, sampler, measure);
  if (!options.checkpoints.empty()) {
    session.use(pacer::Checkpoints(pacer::CheckpointsOptions(options.checkpoints).every(kSaveEvery)));
    session.resume();
    const int64_t step = session.progress().step;
    pacer::require(step <= options.steps, "the checkpoint in ", options.checkpoints, " is of step ", step,
                   ", past the last one, ", options.steps, "; raise --steps or choose another folder");
  }
  measure();
  while (session.progress().step < options.steps) {
    const auto rows = sampler.next(static_cast<size_t>(kBatch / options.pipelines));
    const auto [x, y] = text.training(*rows);
    pipeline.step(session, x, y, first, last);
    session.step();
  }
  session.finish();
  return loss;
}

// The same by one rank: the model in one piece, the micro-batches of all pipelines one after the other.
double train_whole(const at::Device& device, const Options& options, const Text& text) {
  auto model = byte_gpt::make_gpt();
  model->to(device);
  pacer::FusedAdamW optimizer(model->named_parameters(), recipe());
  pacer::EpochSampler sampler(text.size(), /*seed=*/1);
  pacer::Session session(*model, optimizer, pacer::Communicator::alone(device));
  double loss = 0;
  use_hooks(session, sampler, [&] {
    const auto [x, y] = text.held_out(kBatch);
    return loss = model->forward(x.to(device), y.to(device)).item<double>();
  });
  const int64_t micro_steps = options.schedule.micro_batches * options.pipelines;
  session.use(pacer::GradientAccumulation(micro_steps));
  while (session.progress().step < options.steps) {
    const auto rows = sampler.next(static_cast<size_t>(kBatch / micro_steps));
    const auto batch = text.training(*rows);
    auto [x, y] = session.begin(batch.first, batch.second);
    session.backward(model->forward(x, y));
    session.step();
  }
  session.finish();
  return loss;
}

void run(const World& world, const Options& options) {
  torch::set_num_threads(1);  // so small a model gains nothing from a second one
  const Text text(PACER_TORCH_INCLUDE_DIR "/ATen/core/TensorBody.h");
  const double piped = train_pipeline(world, options, text);
  if (!options.compare) return;
  // The norm adds up in another order, and with several pipelines gradients do, too.
  constexpr double kTolerance = 1e-3;
  const double whole = train_whole(world->device(), options, text);
  pacer::require<pacer::Error>(std::abs(piped - whole) < kTolerance, "the pipeline ends with a loss of ",
                               piped, ", but one rank with the whole model with ", whole);
  if (world->rank() == 0) {
    std::printf("the loss is that of one rank with the whole model: %.6f and %.6f\n", piped, whole);
  }
}

std::optional<Options> read_options(int argument_count, char** arguments) {
  namespace po = boost::program_options;
  using pacer::PipelineOrder;
  auto known = examples::make_options();
  known.add_options()                                                                         //
      ("stages", po::value<int>()->value_name("P")->default_value(2), "ranks of a pipeline")  //
      ("pipelines", po::value<int>()->value_name("N")->default_value(1),
       "replicas of each stage; there are P times N ranks")  //
      ("micro-batches", po::value<int64_t>()->value_name("M")->default_value(8),
       "of a step and a pipeline; times N a divisor of 32")  //
      ("schedule",
       po::value<std::string>()->value_name("gpipe|1f1b|interleaved|zero-bubble")->default_value("1f1b"),
       "the order of the passes")  //
      ("chunks", po::value<int64_t>()->value_name("V"),
       "stages of each rank; 2 where interleaved, else 1")  //
      ("steps", po::value<int64_t>()->value_name("K")->default_value(kSteps),
       "to stop after; the learning rate decays over 120")  //
      ("checkpoints", po::value<std::string>()->value_name("FOLDER")->default_value("", "none"),
       "write checkpoints there, and go on from the newest one")  //
      ("compare", "also train the whole model by one rank, and fail where the loss differs");
  const auto given = examples::read_command_line(
      argument_count, arguments,
      "Trains a byte-level GPT on one of LibTorch's own headers, its blocks in stages on several ranks.\n"
      "Starts its ranks by itself, or joins those of torchrun, mpirun or srun.\n",
      known);
  if (!given) return std::nullopt;
  constexpr int kMost = 8;
  Options options;
  options.stages = examples::value_in<int>(*given, "stages", 1, kMost);
  options.pipelines = examples::value_in<int>(*given, "pipelines", 1, kMost);
  options.schedule.order = examples::choice_of<PipelineOrder>(*given, "schedule",
                                                              {{"gpipe", PipelineOrder::gpipe},
                                                               {"1f1b", PipelineOrder::one_f_one_b},
                                                               {"interleaved", PipelineOrder::interleaved},
                                                               {"zero-bubble", PipelineOrder::zero_bubble}});
  options.schedule.ranks = options.stages;
  options.schedule.micro_batches = examples::value_in<int64_t>(*given, "micro-batches", 1, kBatch);
  options.schedule.chunks = examples::value_in<int64_t>(
      *given, "chunks", 1, kMost, options.schedule.order == PipelineOrder::interleaved ? 2 : 1);
  options.schedule.validate();
  pacer::require(kBatch % (options.schedule.micro_batches * options.pipelines) == 0, "--micro-batches ",
                 options.schedule.micro_batches, " times --pipelines ", options.pipelines,
                 " must divide the batch of ", kBatch);
  options.steps = examples::value_in<int64_t>(*given, "steps", 1, kSteps);
  options.checkpoints = (*given)["checkpoints"].as<std::string>();
  options.compare = given->count("compare") != 0;
  return options;
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded(examples::program_name(arguments), [&] {
    const auto options = read_options(argument_count, arguments);
    if (!options) return 0;
    const int ranks = options->stages * options->pipelines;
    const int started = examples::started_processes().value_or(ranks);
    pacer::require(started == ranks, "--stages times --pipelines is ", ranks, ", but there are ", started,
                   " processes; start as many");
    if (const auto exit_code = examples::run_processes(ranks, arguments)) return *exit_code;
    run(examples::join_processes(), *options);
    return 0;
  });
}
