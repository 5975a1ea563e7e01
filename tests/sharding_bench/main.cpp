// pacer-sharding-bench: what recomputation and sharding cost and save in whole training steps, on one GPU or
// several. The model, a GPT or a row of small blocks, has bf16 parameters, and FusedAdamW keeps its default
// 16-bit remainders. peer.py beside it is PyTorch's own on the same model.
//
//   pacer-sharding-bench                                            one GPU, all modes
//   pacer-sharding-bench --modes plain,recompute --layers 12 --width 1536 --batch 16 --sequence 2048
//   pacer-sharding-bench --small-blocks                             64 blocks of 1 M parameters instead
//   torchrun --no-python --nproc-per-node 4 pacer-sharding-bench    four GPUs; the same with any option
//   ... pacer-sharding-bench --ranks-per-node 2 --modes onebit-nodes,onebit-nodes+parameters
//   python3 peer.py, torchrun --nproc-per-node 4 peer.py            the peer, with the same options
//
// Rank 0 prints a JSON line for each mode: the time of a step (the median of eight, after three that do not
// count, on the slowest rank), the peaks of its own memory, allocated and reserved, from before the model is
// made, its loss in the last step, tokens a second for each GPU, what it sends in a step, and the share of
// blocks that layer dropping keeps. bf16 and fp8 are under autocast, which the other modes are not; fused
// ones have pacer::modules::TransformerLayer as blocks. Modes with layer-drop start where theta has come down
// to 0.5; those with onebit-nodes have OneBitAdam with nodes as workers, frozen, in the place of FusedAdamW.
// Small blocks are there for the host's cost: the GPU has little to do in them, and a row of the batch counts
// as a token.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <torch/cuda.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/files/json_lines.h>
#include <pacer/pacer.h>

#include "../bench/timing.h"
#include "device_memory.h"
#include "models.h"

namespace {

using sharding_bench::ModelImpl;
using torch::Tensor;
using World = std::shared_ptr<pacer::Communicator>;

constexpr int kUncountedSteps = 3, kTimedSteps = 8;

// A way to train: the hooks that it adds to a Session.
struct Mode {
  std::string name;
  std::function<void(pacer::Session&, const pacer::Blocks&)> use;
  bool is_onebit = false, drops_layers = false, has_fused_layers = false;
};

pacer::ShardsOptions state_only() { return pacer::ShardsOptions().what(pacer::Sharded::state); }
pacer::Fp8Options but_for_head() { return pacer::Fp8Options().keep_last(1); }
pacer::ShardsOptions in_nodes() { return pacer::ShardsOptions().over(pacer::ShardGroup::node); }

// Where there are several ranks and no Shards, a Session brings DataParallel itself.
const std::vector<Mode>& all_modes() {
  using pacer::Blocks, pacer::Session, pacer::Precision, pacer::Recompute, pacer::Shards;
  static const std::vector<Mode> modes = {
      {"plain", [](Session&, const Blocks&) {}},
      {"recompute", [](Session& session, const Blocks& blocks) { session.use(Recompute(blocks)); }},
      {"bf16", [](Session& session, const Blocks&) { session.use(Precision::bf16()); }},
      {"fp8", [](Session& session, const Blocks&) { session.use(Precision::fp8(but_for_head())); }},
      {"fp8-current",
       [](Session& session, const Blocks&) {
         session.use(Precision::fp8(but_for_head().recipe(pacer::Fp8Recipe::current)));
       }},
      {"fp8+recompute",
       [](Session& session, const Blocks& blocks) {
         session.use(Precision::fp8(but_for_head())).use(Recompute(blocks));
       }},
      {"fused", [](Session&, const Blocks&) {}, false, false, true},
      {"fused+bf16", [](Session& session, const Blocks&) { session.use(Precision::bf16()); }, false, false,
       true},
      {"fused+fp8", [](Session& session, const Blocks&) { session.use(Precision::fp8(but_for_head())); },
       false, false, true},
      {"fused+fp8-current",
       [](Session& session, const Blocks&) {
         session.use(Precision::fp8(but_for_head().recipe(pacer::Fp8Recipe::current)));
       },
       false, false, true},
      {"shards-state", [](Session& session, const Blocks&) { session.use(Shards(state_only())); }},
      {"shards", [](Session& session, const Blocks&) { session.use(Shards()); }},
      {"shards+recompute",
       [](Session& session, const Blocks& blocks) { session.use(Shards()).use(Recompute(blocks)); }},
      {"parameters", [](Session& session, const Blocks& blocks) { session.use(Shards(blocks)); }},
      {"parameters+recompute",
       [](Session& session, const Blocks& blocks) { session.use(Shards(blocks)).use(Recompute(blocks)); }},
      {"layer-drop", [](Session&, const Blocks&) {}, false, true},
      {"parameters+layer-drop", [](Session& session, const Blocks& blocks) { session.use(Shards(blocks)); },
       false, true},
      {"parameters-nodes",
       [](Session& session, const Blocks& blocks) { session.use(Shards(blocks, in_nodes())); }},
      {"onebit-nodes", [](Session&, const Blocks&) {}, true},
      {"onebit-nodes+shards", [](Session& session, const Blocks&) { session.use(Shards(in_nodes())); }, true},
      {"onebit-nodes+parameters",
       [](Session& session, const Blocks& blocks) { session.use(Shards(blocks, in_nodes())); }, true},
  };
  return modes;
}

struct Arguments {
  sharding_bench::Shape shape;
  bool small_blocks = false;
  int64_t ranks_per_node = 0;  // 0: those of a host
  std::vector<Mode> modes = all_modes();
};

std::vector<Mode> modes_named(const std::string& names) {
  std::vector<Mode> chosen;
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    const auto& modes = all_modes();
    const auto found =
        std::find_if(modes.begin(), modes.end(), [&](const Mode& mode) { return mode.name == name; });
    std::string known;
    for (const Mode& mode : modes) known += (known.empty() ? "" : ", ") + mode.name;
    pacer::require(found != modes.end(), "there is no mode '", name, "'; there are ", known);
    chosen.push_back(*found);
  }
  return chosen;
}

int64_t positive_number(const std::string& option, const std::string& text) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  pacer::require(error == std::errc() && stopped == end && value >= 1, option,
                 " wants a whole number from 1 on, not '", text, "'");
  return value;
}

Arguments parse_arguments(const std::vector<std::string>& words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& option = words[i];
    if (option == "--small-blocks") {
      arguments.small_blocks = true;
      continue;
    }
    const bool is_known = option == "--layers" || option == "--width" || option == "--batch" ||
                          option == "--sequence" || option == "--modes" || option == "--ranks-per-node";
    pacer::require(is_known, "unknown option '", option,
                   "'; there are --layers, --width, --batch, --sequence, --modes, --ranks-per-node and "
                   "--small-blocks");
    pacer::require(i + 1 < words.size(), option, " wants a value");
    const std::string& value = words[++i];
    if (option == "--layers") arguments.shape.layers = positive_number(option, value);
    if (option == "--width") arguments.shape.width = positive_number(option, value);
    if (option == "--batch") arguments.shape.batch = positive_number(option, value);
    if (option == "--sequence") arguments.shape.sequence = positive_number(option, value);
    if (option == "--ranks-per-node") arguments.ranks_per_node = positive_number(option, value);
    if (option == "--modes") arguments.modes = modes_named(value);
  }
  pacer::require(arguments.shape.width % 128 == 0, "--width must be a multiple of 128, the size of a head");
  return arguments;
}

std::shared_ptr<ModelImpl> make_model(const Arguments& arguments, const Mode& mode, at::Device device) {
  const auto options = at::TensorOptions().device(device).dtype(at::kBFloat16);
  std::shared_ptr<ModelImpl> model;
  if (arguments.small_blocks) {
    pacer::require(!mode.has_fused_layers, "small blocks are no transformer layers, which ", mode.name,
                   " is about; leave out one of them");
    model = std::make_shared<sharding_bench::SmallBlocksImpl>(options);
  } else {
    model = std::make_shared<sharding_bench::GptImpl>(arguments.shape, options, mode.has_fused_layers);
  }
  model->to(device, at::kBFloat16);  // the norms; all others are there
  return model;
}

double largest_over_ranks(pacer::Communicator& world, double value) {
  double largest = value;
  for (const std::string& text : world.exchange(std::to_string(value))) {
    largest = std::max(largest, std::atof(text.c_str()));
  }
  return largest;
}

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

std::string title_of(const Arguments& arguments, const Mode& mode) {
  return arguments.small_blocks ? mode.name + " small-blocks" : mode.name;
}

// The variance of the 1-bit optimizer has no memory, so that it may freeze after the first step.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Mode& mode, ModelImpl& model,
                                                        const World& world) {
  const auto parameters = model.named_parameters();
  if (!mode.is_onebit) {
    return std::make_unique<pacer::FusedAdamW>(parameters, pacer::FusedAdamWOptions(1e-4));
  }
  const auto options = pacer::OneBitAdamOptions(1e-4).betas({0.9, 0.0}).freeze_step(1).hierarchical(true);
  return std::make_unique<pacer::OneBitAdam>(parameters, options, world);
}

// Everything of the mode is gone when this returns.
pacer::JsonLine train(const Arguments& arguments, const Mode& mode, const World& world) {
  const at::Device device = world->device();
  sharding_bench::start_memory_peaks(device);
  torch::manual_seed(0);
  const auto model = make_model(arguments, mode, device);
  const auto optimizer = make_optimizer(mode, *model, world);
  pacer::Session session(*model, *optimizer, world);
  mode.use(session, model->blocks);
  // So steep a fall that the first steps, which do not count, end it.
  const pacer::LayerDrop layer_drop(model->blocks, pacer::LayerDropOptions().theta_bar(0.5).gamma(100));
  if (mode.drops_layers) session.use(layer_drop);
  torch::manual_seed(static_cast<uint64_t>(world->rank()));
  const auto batch = model->draw_batch();
  Tensor last_loss;
  std::vector<double> times;
  int64_t sent_before = 0;
  double kept = 0;
  for (int step = 0; step < kUncountedSteps + kTimedSteps; ++step) {
    world->barrier();
    torch::cuda::synchronize(device.index());
    if (step == kUncountedSteps) sent_before = world->bytes_sent();
    const pacer::Progress progress = session.progress();
    const bench::Stopwatch watch;
    auto [inputs, targets] = session.begin(batch.first, batch.second);
    const Tensor loss = model->loss(inputs, targets);
    session.backward(loss);
    session.step();
    torch::cuda::synchronize(device.index());
    if (step >= kUncountedSteps) {
      times.push_back(watch.milliseconds());
      kept += layer_drop->kept_layers(progress) / (kTimedSteps * static_cast<double>(layer_drop->layers()));
    }
    last_loss = loss.detach();
  }
  const int64_t sent = (world->bytes_sent() - sent_before) / kTimedSteps;
  const double step_ms = largest_over_ranks(*world, bench::spread_of(times).median);
  const auto peaks = sharding_bench::memory_peaks(device);
  session.finish();
  int64_t parameters = 0;
  for (const Tensor& parameter : model->parameters()) parameters += parameter.numel();
  const Tensor& inputs = batch.first;
  const int64_t tokens = inputs.is_floating_point() ? inputs.size(0) : inputs.numel();
  pacer::JsonLine line;
  line.add("mode", title_of(arguments, mode))
      .add("params_M", std::llround(static_cast<double>(parameters) * 1e-6))
      .add("world", world->world_size())
      .add("ms", rounded(step_ms, 2))
      .add("peak_GB", rounded(peaks.allocated, 2))
      .add("reserved_GB", rounded(peaks.reserved, 2))
      .add("loss", rounded(last_loss.item<double>(), 4))
      .add("tokens_s_gpu", std::llround(static_cast<double>(tokens) / step_ms * 1e3))
      .add("sent_MB", rounded(static_cast<double>(sent) * 1e-6, 2));
  if (mode.drops_layers) line.add("kept_blocks", rounded(kept, 4));
  return line;
}

std::string sentence_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

// One process whose mode fails, because memory is short for example, goes on with the next. Of several, the
// others have to be told, which is what an exception does that leaves the Session.
void run(const Arguments& arguments) {
  const auto options =
      pacer::CommunicatorOptions().ranks_per_node(static_cast<int>(arguments.ranks_per_node));
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
}

}  // namespace

int main(int argument_count, char** arguments) {
  try {
    run(parse_arguments({arguments + 1, arguments + argument_count}));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pacer-sharding-bench: %s\n", sentence_of(error).c_str());
    return 1;
  }
}
