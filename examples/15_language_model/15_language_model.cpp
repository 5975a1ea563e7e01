// A language model from nothing to a folder that Python's transformers loads: a CausalLm on the bytes of a text, with
// Muon or AdamW, a rate that stays at its peak and falls at the end, on one process or several. What to look at: the
// loss on held-out text, and the tokens per second; with --peak also the share of the device that they are.
//
//   15_language_model                                             a header of LibTorch, a small model, about a minute
//   15_language_model --data book.txt --layers 8 --width 512 --bf16 --save run/book
//   15_language_model --processes 2 --shards                      ranks with parts of the weights
//   torchrun --no-python --nproc-per-node 8 15_language_model --fp8 --peak 1979e12
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/command_line.h"
#include "support/processes.h"
#include "support/program.h"
#include "text.h"

namespace {

using pacer::modules::CausalLm;
using World = std::shared_ptr<pacer::Communicator>;

constexpr int64_t kBytes = 256;  // a token is a byte

enum class Rule { muon, adamw };

struct Options {
  std::string data, checkpoints, save;  // a file and two folders; empty: none
  int64_t layers, width, heads, kv_heads, length;
  int64_t batch, steps, every;  // sequences of all processes together
  Rule rule;
  double learning_rate, weight_decay, peak;
  bool bf16, fp8, fp8_head, shards, recompute;
  int64_t seed;
};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const CausalLm& model, const Options& options) {
  if (options.rule == Rule::muon) {
    const auto recipe = pacer::MuonOptions(options.learning_rate).weight_decay(options.weight_decay);
    return std::make_unique<pacer::Muon>(pacer::muon_groups(*model, recipe), recipe);
  }
  return std::make_unique<pacer::FusedAdamW>(
      model->named_parameters(),
      pacer::FusedAdamWOptions(options.learning_rate).weight_decay(options.weight_decay));
}

void use_hooks(pacer::Session& session, CausalLm& model, const Options& options) {
  const int64_t warm_up = options.steps / 10, decay = options.steps / 5;
  session.use(pacer::GradientClipping(1.0))
      .use(pacer::LearningRate(pacer::warmup_stable_decay(
          pacer::LearningRateScheduleOptions(warm_up, options.steps).decay_steps(decay))));
  if (options.bf16) session.use(pacer::Precision::bf16());
  if (options.fp8) session.use(pacer::Precision::fp8());
  if (options.shards) session.use(pacer::Shards(model->layers));
  if (options.recompute) session.use(pacer::Recompute(model->layers));
  pacer::MetricsOptions metrics("run/15_language_model");
  metrics.every(options.every).total_steps(options.steps);
  metrics.operations_per_token(model->operations_per_token(options.length));
  if (options.peak > 0) metrics.peak_operations(options.peak);
  session.use(pacer::Metrics(metrics));
  if (!options.checkpoints.empty()) {
    session.use(pacer::Checkpoints(pacer::CheckpointsOptions(options.checkpoints).every(options.every)));
  }
}

void run(const World& world, const Options& options) {
  const int64_t ranks = world->world_size();
  pacer::require(options.batch % ranks == 0, "--batch ", options.batch, " cannot be shared evenly by ", ranks,
                 " processes");
  const language_model::Text text(options.data, options.length);
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  auto shape = pacer::modules::CausalLmOptions(kBytes, options.width, options.layers, options.heads);
  CausalLm model(shape.kv_heads(options.kv_heads));
  model->to(world->device());
  const auto optimizer = make_optimizer(model, options);
  pacer::EpochSampler sampler(text.windows(), static_cast<uint64_t>(options.seed), *world);
  pacer::Session session(*model, *optimizer, world);
  use_hooks(session, model, options);
  session.use(sampler);
  double held_out = 0;
  session.use(pacer::Validation(options.every, [&] {
    const auto [ids, targets] = text.held_out();
    return held_out = model->loss(ids.to(world->device()), targets.to(world->device())).item<double>();
  }));
  if (!options.checkpoints.empty()) session.resume();
  const pacer::Progress first = session.progress();
  pacer::require(first.step < options.steps, "the checkpoint in ", options.checkpoints, " is of step ",
                 first.step, "; raise --steps or choose another folder");

  const auto of_loss = pacer::modules::LinearCrossEntropyOptions().fp8(options.fp8_head);
  const auto begin = std::chrono::steady_clock::now();
  torch::Tensor loss;
  while (session.progress().step < options.steps) {
    const auto rows = sampler.next(static_cast<size_t>(options.batch / ranks));
    if (!rows) {
      sampler.reset();
      continue;
    }
    const auto batch = text.training(*rows);
    auto [ids, targets] = session.begin(batch.first, batch.second);
    loss = model->loss(ids, targets, of_loss);
    session.backward(loss);
    session.step();
  }
  (void)loss.item<double>();  // all that was enqueued has been done
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  session.finish();

  const auto whole = session.whole_parameters();
  if (world->rank() != 0) return;
  if (!options.save.empty()) {
    pacer::save_causal_lm(*model, options.save, pacer::SaveCausalLmOptions().max_positions(options.length));
    std::printf("%s has the model for transformers\n", options.save.c_str());
  }
  const auto tokens = static_cast<double>(session.progress().tokens - first.tokens);
  const double operations = tokens / seconds * model->operations_per_token(options.length);
  std::printf(
      "%.4f nats per byte of held-out text after %lld steps on %lld processes; %.0f tokens/s, %.1f GFLOP/s",
      held_out, static_cast<long long>(options.steps), static_cast<long long>(ranks), tokens / seconds,
      operations / 1e9);
  if (options.peak > 0) {
    std::printf(", %.1f %% of the peak", 100 * operations / (options.peak * static_cast<double>(ranks)));
  }
  std::printf("\n");
}

struct Start {
  Options options;
  int processes;
};

std::optional<Start> read_options(int argument_count, char** arguments) {
  namespace po = boost::program_options;
  const auto whole = [](const char* name, int64_t value) {
    return po::value<int64_t>()->value_name(name)->default_value(value);
  };
  const auto real = [](double value, const char* shown) {
    return po::value<double>()->value_name("X")->default_value(value, shown);
  };
  const auto place = [](const char* name, const char* shown) {
    return po::value<std::string>()->value_name(name)->default_value("", shown);
  };
  auto known = examples::make_options();
  known.add_options()                                                                            //
      ("data", place("FILE", "a header of LibTorch"), "the text, whose last tenth is held out")  //
      ("layers", whole("N", 3), "transformer layers")                                            //
      ("width", whole("N", 96), "of a layer; a multiple of 16 for --fp8")                        //
      ("heads", whole("N", 4), "of queries")                                                     //
      ("kv-heads", whole("N", 2), "of keys and values; divides the heads")                       //
      ("length", whole("N", 128), "bytes of a sequence")                                         //
      ("batch", whole("N", 16), "sequences in a step, of all processes together")                //
      ("steps", whole("N", 120), "of the run; the rate falls over the last fifth")               //
      ("every", whole("N", 20), "steps between two records, measurements and checkpoints")       //
      ("optimizer", po::value<std::string>()->value_name("muon|adamw")->default_value("muon"),
       "the rule for matrices")                                                                           //
      ("learning-rate", real(3e-3, "0.003"), "at its peak")                                               //
      ("weight-decay", real(0.1, "0.1"), "of matrices and vectors")                                       //
      ("bf16", examples::make_switch(), "forward in bfloat16")                                            //
      ("fp8", examples::make_switch(), "products of the layers in 8-bit floats")                          //
      ("fp8-head", examples::make_switch(), "those of the head, too")                                     //
      ("recompute", examples::make_switch(), "layers run again in backward, for memory")                  //
      ("shards", examples::make_switch(), "each process keeps its part of weights and state")             //
      ("checkpoints", place("FOLDER", "none"), "write checkpoints there, and go on from the newest one")  //
      ("save", place("FOLDER", "none"), "write the model there as Hugging Face has it")                   //
      ("peak", real(0, "none"), "operations a second that a device can do, as 989e12")                    //
      ("seed", whole("N", 1), "of weights and order")                                                     //
      ("processes", po::value<int>()->value_name("N")->default_value(1),
       "ranks to start on this machine; leave it out under torchrun, mpirun or srun");
  const auto given = examples::read_command_line(
      argument_count, arguments,
      "Trains a decoder as Llama is on the bytes of a text, and says how fast and how well.\n", known);
  if (!given) return std::nullopt;
  constexpr int64_t kMost = 1'000'000;
  constexpr int kMostProcesses = 64;
  const auto number = [&](const char* name, int64_t least) {
    return examples::value_in<int64_t>(*given, name, least, kMost);
  };
  const auto is_on = [&](const char* name) { return given->count(name) != 0 && (*given)[name].as<bool>(); };
  Options options;
  options.data = (*given)["data"].as<std::string>();
  options.checkpoints = (*given)["checkpoints"].as<std::string>();
  options.save = (*given)["save"].as<std::string>();
  options.layers = number("layers", 1);
  options.width = number("width", 1);
  options.heads = number("heads", 1);
  options.kv_heads = number("kv-heads", 1);
  options.length = number("length", 1);
  options.batch = number("batch", 1);
  options.steps = number("steps", 1);
  options.every = number("every", 1);
  options.seed = number("seed", 0);
  options.rule =
      examples::choice_of<Rule>(*given, "optimizer", {{"muon", Rule::muon}, {"adamw", Rule::adamw}});
  options.learning_rate = examples::value_in<double>(*given, "learning-rate", 0, 1);
  options.weight_decay = examples::value_in<double>(*given, "weight-decay", 0, 1);
  constexpr double kLargestPeak = 1e18;
  options.peak = examples::value_in<double>(*given, "peak", 0, kLargestPeak);
  options.bf16 = is_on("bf16");
  options.fp8 = is_on("fp8");
  options.fp8_head = is_on("fp8-head");
  options.recompute = is_on("recompute");
  options.shards = is_on("shards");
  pacer::require(!options.bf16 || !options.fp8, "--fp8 has bf16 around its products; leave --bf16 out");
  pacer::require(options.fp8 || !options.fp8_head, "--fp8-head goes with --fp8");
  return Start{options, examples::value_in<int>(*given, "processes", 1, kMostProcesses)};
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded(examples::program_name(arguments), [&] {
    const auto start = read_options(argument_count, arguments);
    if (!start) return 0;
    if (const auto exit_code = examples::run_processes(start->processes, arguments)) return *exit_code;
    run(examples::join_processes(), start->options);
    return 0;
  });
}
