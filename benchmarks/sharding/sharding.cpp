// What recomputation and sharding cost and save in whole training steps.
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/files/json_lines.h>
#include <pacer/pacer.h>

#include "models.h"
#include "subcommands.h"
#include "support/device.h"
#include "support/ranks.h"
#include "support/table.h"

namespace bench::sharding {
namespace {

constexpr const char* kAbout =
    R"(Measures what recomputation and sharding cost and save in whole training steps, on one GPU or
several. The model, a GPT or a row of small blocks, has bf16 parameters, and FusedAdamW keeps its
default 16-bit remainders. benchmarks/sharding/peer.py is PyTorch's own on the same model, with the
same options.

  pacer-bench sharding                                            one GPU, all modes
  pacer-bench sharding --modes plain,recompute --layers 12 --width 1536 --batch 16 --sequence 2048
  torchrun --no-python --nproc-per-node 4 pacer-bench sharding    four GPUs; the same with any option
  ... pacer-bench sharding --ranks-per-node 2 --modes onebit-nodes,onebit-nodes+parameters

Rank 0 prints a JSON line for each mode: the time of a step (the median of eight, after three that
do not count, on the slowest rank), the peaks of its own memory, allocated and reserved, from before
the model is made, its loss in the last step, tokens a second for each GPU, what it sends in a step,
and the share of blocks that layer dropping keeps. bf16 and fp8 are under autocast, which the other
modes are not; fused ones have pacer::modules::TransformerLayer as blocks. Modes with layer-drop start
where theta has come down to 0.5; those with onebit-nodes have OneBitAdam with nodes as workers,
frozen, in the place of FusedAdamW. Small blocks are there for the host's cost: the GPU has little
to do in them, and a row of the batch counts as a token.
)";

constexpr int kUncountedSteps = 3, kTimedSteps = 8;

// A way to train: the hooks that it adds to a Session, and what its name says besides.
struct Mode {
  std::string name;
  std::function<void(pacer::Session&, const pacer::Blocks&)> use;

  bool is_onebit() const { return name.rfind("onebit", 0) == 0; }
  bool has_fused_layers() const { return name.rfind("fused", 0) == 0; }
  bool drops_layers() const { return name.find("layer-drop") != std::string::npos; }
};

pacer::Fp8Options but_for_head() { return pacer::Fp8Options().keep_last(1); }
pacer::ShardsOptions in_nodes() { return pacer::ShardsOptions().over(pacer::ShardGroup::node); }

// Where there are several ranks and no Shards, a Session brings DataParallel itself.
std::vector<Mode> all_modes() {
  using pacer::Blocks, pacer::Session, pacer::Precision, pacer::Recompute, pacer::Shards;
  const auto nothing = [](Session&, const Blocks&) {};
  const auto recompute = [](Session& s, const Blocks& blocks) { s.use(Recompute(blocks)); };
  const auto bf16 = [](Session& s, const Blocks&) { s.use(Precision::bf16()); };
  const auto fp8 = [](Session& s, const Blocks&) { s.use(Precision::fp8(but_for_head())); };
  const auto fp8_current = [](Session& s, const Blocks&) {
    s.use(Precision::fp8(but_for_head().recipe(pacer::Fp8Recipe::current)));
  };
  const auto shards = [](Session& s, const Blocks&) { s.use(Shards()); };
  const auto state = [](Session& s, const Blocks&) {
    s.use(Shards(pacer::ShardsOptions().what(pacer::Sharded::state)));
  };
  const auto parameters = [](Session& s, const Blocks& blocks) { s.use(Shards(blocks)); };
  const auto shards_in_nodes = [](Session& s, const Blocks&) { s.use(Shards(in_nodes())); };
  const auto parameters_in_nodes = [](Session& s, const Blocks& blocks) {
    s.use(Shards(blocks, in_nodes()));
  };
  const auto and_recompute = [&](const auto& first) {
    return [=](Session& s, const Blocks& blocks) { first(s, blocks), recompute(s, blocks); };
  };
  return {{"plain", nothing},
          {"recompute", recompute},
          {"bf16", bf16},
          {"fp8", fp8},
          {"fp8-current", fp8_current},
          {"fp8+recompute", and_recompute(fp8)},
          {"fused", nothing},
          {"fused+bf16", bf16},
          {"fused+fp8", fp8},
          {"fused+fp8-current", fp8_current},
          {"shards-state", state},
          {"shards", shards},
          {"shards+recompute", and_recompute(shards)},
          {"parameters", parameters},
          {"parameters+recompute", and_recompute(parameters)},
          {"layer-drop", nothing},
          {"parameters+layer-drop", parameters},
          {"parameters-nodes", parameters_in_nodes},
          {"onebit-nodes", nothing},
          {"onebit-nodes+shards", shards_in_nodes},
          {"onebit-nodes+parameters", parameters_in_nodes}};
}

struct Arguments {
  Shape shape;
  bool small_blocks = false;
  std::vector<Mode> modes;
};

Arguments arguments_of(const examples::OptionValues& given) {
  Arguments arguments;
  arguments.shape = {number_in(given, "layers"), number_in(given, "width"), number_in(given, "batch"),
                     number_in(given, "sequence")};
  pacer::require(arguments.shape.width % kHeadSize == 0,
                 "--width must be a multiple of 128, the size of a head");
  arguments.small_blocks = given.count("small-blocks") != 0;
  std::vector<std::pair<std::string, Mode>> known;
  for (const Mode& mode : all_modes()) known.emplace_back(mode.name, mode);
  for (const std::string& name : examples::split(given["modes"].as<std::string>())) {
    arguments.modes.push_back(examples::choice_named(name, "modes", known));
  }
  return arguments;
}

std::shared_ptr<ModelImpl> make_model(const Arguments& arguments, const Mode& mode, at::Device device) {
  const auto options = at::TensorOptions().device(device).dtype(at::kBFloat16);
  std::shared_ptr<ModelImpl> model;
  if (arguments.small_blocks) {
    pacer::require(!mode.has_fused_layers(), "small blocks are no transformer layers, which ", mode.name,
                   " is about; leave out one of them");
    model = std::make_shared<SmallBlocksImpl>(options);
  } else {
    model = std::make_shared<GptImpl>(arguments.shape, options, mode.has_fused_layers());
  }
  model->to(device, at::kBFloat16);  // the norms; all others are there
  return model;
}

std::string title_of(const Arguments& arguments, const Mode& mode) {
  return arguments.small_blocks ? mode.name + " small-blocks" : mode.name;
}

// The variance of the 1-bit optimizer has no memory, so that it may freeze after the first step.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Mode& mode, ModelImpl& model,
                                                        const World& world) {
  const auto parameters = model.named_parameters();
  if (!mode.is_onebit()) {
    return std::make_unique<pacer::FusedAdamW>(parameters, pacer::FusedAdamWOptions(1e-4));
  }
  const auto options = pacer::OneBitAdamOptions(1e-4).betas({0.9, 0.0}).freeze_step(1).hierarchical(true);
  return std::make_unique<pacer::OneBitAdam>(parameters, options, world);
}

// Everything of the mode is gone when this returns.
pacer::JsonLine train(const Arguments& arguments, const Mode& mode, const World& world) {
  const at::Device device = world->device();
  start_memory_peaks(device);
  torch::manual_seed(0);
  const auto model = make_model(arguments, mode, device);
  const auto optimizer = make_optimizer(mode, *model, world);
  pacer::Session session(*model, *optimizer, world);
  mode.use(session, model->blocks);
  // So steep a fall that the first steps, which do not count, end it.
  const pacer::LayerDrop layer_drop(model->blocks, pacer::LayerDropOptions().theta_bar(0.5).gamma(100));
  if (mode.drops_layers()) session.use(layer_drop);
  torch::manual_seed(static_cast<uint64_t>(world->rank()));
  const auto batch = model->draw_batch();
  Tensor last_loss;
  std::vector<double> times;
  int64_t sent_before = 0;
  double kept = 0;
  for (int step = 0; step < kUncountedSteps + kTimedSteps; ++step) {
    world->barrier();
    synchronize(device);
    if (step == kUncountedSteps) sent_before = world->bytes_sent();
    const pacer::Progress progress = session.progress();
    const Stopwatch watch;
    auto [inputs, targets] = session.begin(batch.first, batch.second);
    const Tensor loss = model->loss(inputs, targets);
    session.backward(loss);
    session.step();
    synchronize(device);
    if (step >= kUncountedSteps) {
      times.push_back(watch.milliseconds());
      kept += layer_drop->kept_layers(progress) / (kTimedSteps * static_cast<double>(layer_drop->layers()));
    }
    last_loss = loss.detach();
  }
  const int64_t sent = (world->bytes_sent() - sent_before) / kTimedSteps;
  const double step_ms = largest(over_ranks(*world, spread_of(times).median));
  const auto peaks = memory_peaks(device);
  session.finish();
  int64_t parameters = 0;
  for (const Tensor& parameter : model->parameters()) parameters += parameter.numel();
  const Tensor& inputs = batch.first;
  const int64_t tokens = inputs.is_floating_point() ? inputs.size(0) : inputs.numel();
  pacer::JsonLine line;
  line.add("mode", title_of(arguments, mode));
  line.add("params_M", std::llround(static_cast<double>(parameters) * 1e-6));
  line.add("world", world->world_size()).add("ms", rounded(step_ms, 2));
  line.add("peak_GB", rounded(peaks.allocated, 2)).add("reserved_GB", rounded(peaks.reserved, 2));
  line.add("loss", rounded(last_loss.item<double>(), 4));
  line.add("tokens_s_gpu", std::llround(static_cast<double>(tokens) / step_ms * 1e3));
  line.add("sent_MB", rounded(static_cast<double>(sent) * 1e-6, 2));
  if (mode.drops_layers()) line.add("kept_blocks", rounded(kept, 4));
  return line;
}

std::string sentence_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

// One process whose mode fails, because memory is short for example, goes on with the next. Of several, the
// others have to be told, which is what an exception does that leaves the Session.
int run(const examples::OptionValues& given) {
  const Arguments arguments = arguments_of(given);
  const auto options = pacer::CommunicatorOptions().ranks_per_node(
      examples::value_in<int>(given, "ranks-per-node", 1, 1 << 20, 0));
  const World world = pacer::Communicator::from_environment(options);
  pacer::require<pacer::Unavailable>(
      world->device().is_cuda(),
      "the figures are of an NVIDIA GPU for each rank, and this machine or build has none");
  for (const Mode& mode : arguments.modes) {
    pacer::JsonLine line;
    try {
      line = train(arguments, mode, world);
    } catch (const std::exception& error) {
      if (world->world_size() > 1) throw;
      line.add("mode", title_of(arguments, mode)).add("error", sentence_of(error));
    }
    if (world->rank() == 0) std::printf("%s\n", line.str().c_str());
    std::fflush(stdout);
  }
  world->barrier();
  return 0;
}

std::string names_of_all_modes(const std::string& between) {
  std::string names;
  for (const Mode& mode : all_modes()) names += (names.empty() ? "" : between) + mode.name;
  return names;
}

}  // namespace

Subcommand subcommand() {
  Subcommand sharding{"sharding",
                      "whole training steps with recomputation, 8 bits and shards, on one GPU or several",
                      kAbout, run};
  const Shape shape;
  sharding.options.add_options()                                                                    //
      ("layers", whole_number(shape.layers), "of the GPT")                                          //
      ("width", whole_number(shape.width), "of its layers, a multiple of 128")                      //
      ("batch", whole_number(shape.batch), "sequences of a rank")                                   //
      ("sequence", whole_number(shape.sequence), "tokens of a sequence")                            //
      ("small-blocks", "train 64 blocks of 1 M parameters instead")                                 //
      ("ranks-per-node", po::value<int>()->value_name("N"), "that share a node (those of a host)")  //
      ("modes", word("MODE,...")->default_value(names_of_all_modes(","), "all"),
       names_of_all_modes(", ").c_str());
  return sharding;
}

}  // namespace bench::sharding
