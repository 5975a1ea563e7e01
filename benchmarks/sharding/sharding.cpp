// What recomputation and sharding cost and save in whole training steps.
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "subcommands.h"
#include "support/gpt.h"
#include "support/memory_peak.h"
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
modes are not; fused ones have pacer::modules::TransformerLayer as blocks, and those with loss
linear_cross_entropy behind them; those with 8bit have moments in 8 bits; those with keep-attention or
keep-products keep the results of these operators instead of computing them again. Modes with layer-drop start
where theta has come down to 0.5; those with onebit-nodes have OneBitAdam with nodes as workers,
frozen, in the place of FusedAdamW; those with muon have Muon, with muon-shared one whose ranks share
the products. Small blocks are there for the host's cost: the GPU has little to do in them, and a row
of the batch counts as a token. With --peak, lines for each mode say what fills rank 0's memory when
most of it is taken: tensors of one size, by when they were taken.
)";

constexpr int kUncountedSteps = 3, kTimedSteps = 8;
constexpr int64_t kVocabulary = 32768;
constexpr int64_t kShownBytes = int64_t{1} << 24;  // of a kind, at least

// A way to train; its name says what is trained, and by which hooks.
struct Mode {
  std::string name;

  bool has(const char* part) const { return name.find(part) != std::string::npos; }

  // Where there are several ranks and no Shards, a Session brings DataParallel itself.
  void use_hooks(pacer::Session& session, const pacer::Blocks& blocks) const {
    if (has("recompute")) {
      pacer::RecomputeOptions recompute;
      if (has("keep-attention")) recompute.keep(pacer::KeptOperators::attention());
      if (has("keep-products")) recompute.keep(pacer::KeptOperators::products());
      session.use(pacer::Recompute(blocks, recompute));
    }
    if (has("bf16")) session.use(pacer::Precision::bf16());
    if (has("fp8")) {
      const auto recipe = has("current") ? pacer::Fp8Recipe::current : pacer::Fp8Recipe::delayed;
      session.use(pacer::Precision::fp8(pacer::Fp8Options().keep_last(1).recipe(recipe)));  // not the head
    }
    pacer::ShardsOptions options;
    if (has("state")) options.what(pacer::Sharded::state);
    if (has("nodes")) options.over(pacer::ShardGroup::node);
    if (has("shards")) session.use(pacer::Shards(options));
    if (has("parameters")) session.use(pacer::Shards(blocks, options));
  }
};

constexpr const char* kModes =
    "plain,recompute,loss+recompute+8bit,bf16,fp8,fp8-current,fp8+recompute,"
    "recompute-keep-attention,recompute-keep-products,"
    "fused+recompute-keep-attention,fused+recompute-keep-products,"
    "fused,fused+recompute,fused+bf16,fused+fp8,fused+fp8+recompute,fused+fp8-current,"
    "shards-state,shards,shards+recompute,parameters,parameters+recompute,layer-drop,parameters+layer-drop,"
    "parameters+loss,parameters+loss+recompute,parameters+loss+8bit,parameters+loss+8bit+recompute,"
    "parameters+8bit,parameters+8bit+recompute,"
    "parameters-nodes,onebit-nodes,onebit-nodes+shards,onebit-nodes+parameters,"
    "muon,muon-shared,muon+shards,muon+parameters";

struct Arguments {
  GptShape shape;
  int64_t batch;
  bool small_blocks, shows_peak;
  std::vector<Mode> modes;
};

Arguments arguments_of(const examples::OptionValues& given) {
  std::vector<std::pair<std::string, Mode>> known;
  for (const std::string& mode : examples::split(kModes)) known.emplace_back(mode, Mode{mode});
  const GptShape shape = {number_in(given, "layers"), number_in(given, "width"), number_in(given, "sequence"),
                          kVocabulary};
  require_whole_heads(shape);
  return {shape, number_in(given, "batch"), given.count("small-blocks") != 0, given.count("peak") != 0,
          examples::choices_of<Mode>(given, "modes", known)};
}

// A million parameters and hardly any arithmetic: [32, 724] -> the same.
struct SmallBlockImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 724;
  explicit SmallBlockImpl(const at::TensorOptions& options)
      : up(register_module("up", Projection(kWidth, kWidth, options))),
        down(register_module("down", Projection(kWidth, kWidth, options))) {}
  Tensor forward(const Tensor& x) { return x + down(torch::relu(up(x))); }
  Projection up, down;
};
TORCH_MODULE(SmallBlock);

// A GPT of plain layers or a row of small blocks, both in bf16, with their blocks in a pacer::Blocks. peer.py
// builds the same.
struct Model {
  std::shared_ptr<torch::nn::Module> module;
  pacer::Blocks blocks;
  std::function<Tensor(const Tensor& inputs, const Tensor& targets)> loss;
  std::function<std::pair<Tensor, Tensor>()> draw_batch;  // inputs and targets
};

Model make_gpt(const Arguments& arguments, const Mode& mode, const at::TensorOptions& options) {
  GptShape shape = arguments.shape;
  shape.is_fused = mode.has("fused");
  shape.keeps_logits = !mode.has("loss");
  const Gpt gpt(shape, options);
  return {gpt.ptr(), gpt->blocks, [gpt](const Tensor& x, const Tensor& y) { return gpt.ptr()->loss(x, y); },
          [=] { return draw_batch(shape, arguments.batch, options.device()); }};
}

Model make_small_blocks(const at::TensorOptions& options) {
  constexpr int64_t kBlocks = 64, kBatch = 32;
  Model model;
  model.module = std::make_shared<torch::nn::Module>("SmallBlocks");
  model.module->register_module("blocks", model.blocks);
  for (int64_t i = 0; i < kBlocks; ++i) model.blocks->push_back(SmallBlock(options));
  model.loss = [blocks = model.blocks](const Tensor& inputs, const Tensor& targets) {
    Tensor x = inputs;
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks.ptr()->run(i, &SmallBlockImpl::forward, x);
    return torch::mse_loss(x.to(at::kFloat), targets);
  };
  model.draw_batch = [options] {
    const Tensor inputs = torch::randn({kBatch, SmallBlockImpl::kWidth}, options);
    return std::pair(inputs, torch::randn(inputs.sizes(), options.dtype(at::kFloat)));
  };
  return model;
}

Model make_model(const Arguments& arguments, const Mode& mode, at::Device device) {
  const auto options = at::TensorOptions().device(device).dtype(at::kBFloat16);
  if (!arguments.small_blocks) return make_gpt(arguments, mode, options);
  pacer::require(!mode.has("fused"), "small blocks are no transformer layers, which ", mode.name,
                 " is about; leave out one of them");
  return make_small_blocks(options);
}

std::string title_of(const Arguments& arguments, const Mode& mode) {
  return arguments.small_blocks ? mode.name + " small-blocks" : mode.name;
}

// The variance of the 1-bit optimizer has no memory, so that it may freeze after the first step.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Mode& mode, const torch::nn::Module& model,
                                                        const World& world) {
  const auto parameters = model.named_parameters();
  if (mode.has("muon")) {
    auto muon = std::make_unique<pacer::Muon>(pacer::muon_groups(model, pacer::MuonOptions(1e-4)));
    if (mode.has("muon-shared")) muon->share_products(world);
    return muon;
  }
  if (!mode.has("onebit")) {
    const auto options = pacer::FusedAdamWOptions(1e-4).state_bits(mode.has("8bit") ? 8 : 32);
    return std::make_unique<pacer::FusedAdamW>(parameters, options);
  }
  const auto options = pacer::OneBitAdamOptions(1e-4).betas({0.9, 0.0}).freeze_step(1).hierarchical(true);
  return std::make_unique<pacer::OneBitAdam>(parameters, options, world);
}

// Everything of the mode is gone when this returns.
pacer::JsonLine train(const Arguments& arguments, const Mode& mode, const World& world) {
  const at::Device device = world->device();
  start_memory_peaks(device);
  if (arguments.shows_peak) start_memory_trace();
  set_memory_phase("model");
  torch::manual_seed(0);
  const Model model = make_model(arguments, mode, device);
  const auto optimizer = make_optimizer(mode, *model.module, world);
  pacer::Session session(*model.module, *optimizer, world);
  mode.use_hooks(session, model.blocks);
  // So steep a fall that the first steps, which do not count, end it.
  const pacer::LayerDrop layer_drop(model.blocks, pacer::LayerDropOptions().theta_bar(0.5).gamma(100));
  if (mode.has("layer-drop")) session.use(layer_drop);
  torch::manual_seed(static_cast<uint64_t>(world->rank()));
  const auto batch = model.draw_batch();
  Tensor last_loss;
  std::vector<double> times;
  int64_t sent_before = 0;
  double kept = 0;
  for (int step = 0; step < kUncountedSteps + kTimedSteps; ++step) {
    world->barrier();
    if (step == kUncountedSteps) sent_before = world->bytes_sent();
    const pacer::Progress progress = session.progress();
    const double milliseconds = milliseconds_of(device, [&] {
      set_memory_phase("begin");  // in the first step: what hooks need all the time
      auto [inputs, targets] = session.begin(batch.first, batch.second);
      set_memory_phase("forward");
      const Tensor loss = model.loss(inputs, targets);
      set_memory_phase("backward");
      session.backward(loss);
      set_memory_phase("step");  // in the first step: the optimizer's state
      session.step();
      last_loss = loss.detach();
    });
    if (step < kUncountedSteps) continue;
    times.push_back(milliseconds);
    kept += layer_drop->kept_layers(progress) / (kTimedSteps * static_cast<double>(layer_drop->layers()));
  }
  const int64_t sent = (world->bytes_sent() - sent_before) / kTimedSteps;
  const double step_ms = largest(over_ranks(*world, spread_of(times).median));
  const auto peaks = memory_peaks(device);
  session.finish();
  int64_t parameters = 0;
  for (const Tensor& parameter : model.module->parameters()) parameters += parameter.numel();
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
  if (mode.has("layer-drop")) line.add("kept_blocks", rounded(kept, 4));
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
  pacer::CommunicatorOptions options;
  if (given.count("ranks-per-node") != 0) {
    options.ranks_per_node(examples::value_in<int>(given, "ranks-per-node", 1, 1 << 20));
  }
  const World world = pacer::Communicator::from_environment(options);
  pacer::require<pacer::Unavailable>(
      world->device().is_cuda(),
      "the figures are of an NVIDIA GPU for each rank, and this machine or build has none");
  if (given.count("memory") != 0) {
    limit_memory(world->device(), examples::value_in<double>(given, "memory", 1e-3, 1e6));
  }
  for (const Mode& mode : arguments.modes) {
    pacer::JsonLine line;
    try {
      line = train(arguments, mode, world);
    } catch (const std::exception& error) {
      if (world->world_size() > 1) throw;
      line.add("mode", title_of(arguments, mode)).add("error", sentence_of(error));
    }
    const std::vector<MemoryKind> kinds =
        arguments.shows_peak ? memory_at_peak(world->device()) : std::vector<MemoryKind>();
    if (world->rank() != 0) continue;
    print(line);
    for (const MemoryKind& kind : kinds) {
      if (kind.bytes * kind.count < kShownBytes) break;
      print(pacer::JsonLine()
                .add("mode", title_of(arguments, mode))
                .add("peak_of", kind.phase)
                .add("GB", rounded(static_cast<double>(kind.bytes * kind.count) * 1e-9, 3))
                .add("tensors", kind.count)
                .add("MB_each", rounded(static_cast<double>(kind.bytes) * 1e-6, 2)));
    }
  }
  world->barrier();
  return 0;
}

std::string names_of_all_modes() {
  std::string names;
  for (const std::string& mode : examples::split(kModes)) names += (names.empty() ? "" : ", ") + mode;
  return names;
}

}  // namespace

Subcommand subcommand() {
  Subcommand sharding{"sharding",
                      "whole training steps with recomputation, 8 bits and shards, on one GPU or several",
                      kAbout, run};
  const GptShape shape;
  sharding.options.add_options()                                                                     //
      ("layers", whole_number(shape.layers), "of the GPT")                                           //
      ("width", whole_number(shape.width), "of its layers, a multiple of 128")                       //
      ("batch", whole_number(8), "sequences of a rank")                                              //
      ("sequence", whole_number(shape.length), "tokens of a sequence")                               //
      ("memory", po::value<double>()->value_name("GB"), "that tensors may take (all of the GPU's)")  //
      ("peak", "say what fills the memory at its peak")                                              //
      ("small-blocks", "train 64 blocks of 1 M parameters instead")                                  //
      ("ranks-per-node", po::value<int>()->value_name("N"), "that share a node (those of a host)")   //
      ("modes", word("MODE,...")->default_value(kModes, "all"), names_of_all_modes().c_str());
  return sharding;
}

}  // namespace bench::sharding
