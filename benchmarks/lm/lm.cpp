// Tokens a second of a language model of today, and the share of the GPU's products that they are.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/matmul.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "subcommands.h"
#include "support/gpu_time.h"
#include "support/memory_peak.h"
#include "support/ranks.h"
#include "support/table.h"

namespace bench::lm {
namespace {

constexpr const char* kAbout =
    R"(Measures whole training steps of a CausalLm, on one GPU or several, in tokens a second of each GPU and as
a share of what a bf16 product of 8192 x 8192 x 8192 reaches in the same run. Weights are bf16 and
the optimizer is FusedAdamW with its default 16-bit remainders, or Muon. benchmarks/lm/peer.py is
transformers' model of the same shape.

  pacer-bench lm                                          one GPU, all modes
  pacer-bench lm --shape llama-3.1-8b --layers 4 --modes bf16,fp8
  torchrun --no-python --nproc-per-node 8 pacer-bench lm --modes bf16+parameters+recompute

Rank 0 prints a JSON line for each mode: the time of a step (the median of eight, after four that do
not count, on the slowest rank), the peaks of its own memory, its loss in the last
step, and tokens a second for each GPU. A mode is words joined by '+': bf16 or fp8 (the layers' products of
8-bit floats), and head (the head's, too), recompute, parameters (Shards of the blocks), split (by rows, the head
of these), 8bit (moments), release (of gradients), muon; with recompute, keep-attention or keep-products
(results of these operators are kept instead of computed again).
)";

constexpr int kUncountedSteps = 4, kTimedSteps = 8;
constexpr int64_t kProduct = 8192;
constexpr const char* kModes = "bf16,fp8,fp8+head,bf16+muon,bf16+8bit,bf16+recompute,fp8+recompute";
const std::vector<std::string> kWords{"bf16",           "fp8",           "head",       "recompute",
                                      "keep-attention", "keep-products", "parameters", "split",
                                      "8bit",           "release",       "muon"};

using pacer::modules::CausalLm;
using pacer::modules::CausalLmOptions;
using LossOptions = pacer::modules::LinearCrossEntropyOptions;

CausalLmOptions options_of(const std::string& shape) {
  if (shape == "qwen2.5-1.5b") {
    return CausalLmOptions(151'936, 1536, 28, 12).kv_heads(2).ffn(8960).qkv_bias(true).tied(true).theta(1e6);
  }
  if (shape == "llama-3.1-8b")
    return CausalLmOptions(128'256, 4096, 32, 32).kv_heads(8).ffn(14'336).theta(5e5);
  pacer::require(shape == "small", "--shape is qwen2.5-1.5b, llama-3.1-8b or small, not ", shape);
  return CausalLmOptions(32'768, 768, 12, 12).kv_heads(4);
}

std::vector<std::string> words_of(const std::string& mode) {
  std::string spaced = mode;
  for (char& letter : spaced) letter = letter == '+' ? ',' : letter;
  auto words = examples::split(spaced);
  for (const std::string& word : words) {
    pacer::require(std::find(kWords.begin(), kWords.end(), word) != kWords.end(), "--modes: '", word,
                   "' in '", mode, "' is no word of a mode; --help lists them");
  }
  return words;
}

struct Mode {
  explicit Mode(const std::string& called) : name(called), words(words_of(called)) {
    pacer::require(has("bf16") != has("fp8"), "--modes: '", name, "' needs one of bf16 and fp8");
    pacer::require(has("recompute") ? !has("keep-attention") || !has("keep-products")
                                    : !has("keep-attention") && !has("keep-products"),
                   "--modes: '", name,
                   "' needs recompute for keep-attention or keep-products, and takes one of them");
    pacer::require(has("parameters") || !has("split"), "--modes: '", name,
                   "' splits the head of no parameters");
  }
  bool has(const char* word) const { return std::find(words.begin(), words.end(), word) != words.end(); }
  std::string name;
  std::vector<std::string> words;
};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Mode& mode, const CausalLm& model) {
  if (mode.has("muon")) {
    return std::make_unique<pacer::Muon>(pacer::muon_groups(*model, pacer::MuonOptions(1e-4)));
  }
  return std::make_unique<pacer::FusedAdamW>(
      model->named_parameters(), pacer::FusedAdamWOptions(1e-4).state_bits(mode.has("8bit") ? 8 : 32));
}

void use_hooks(const Mode& mode, pacer::Session& session, CausalLm& model) {
  if (mode.has("fp8")) session.use(pacer::Precision::fp8());
  if (mode.has("recompute")) {
    pacer::RecomputeOptions options;
    if (mode.has("keep-attention")) options.keep(pacer::KeptOperators::attention());
    if (mode.has("keep-products")) options.keep(pacer::KeptOperators::products());
    session.use(pacer::Recompute(model->layers, options));
  }
  if (mode.has("release")) session.use(pacer::GradientRelease());
  if (mode.has("parameters"))
    session.use(pacer::Shards(model->layers, pacer::ShardsOptions().split_head(mode.has("split"))));
}

struct Batch {
  int64_t sequences, length;
  LossOptions loss;
};

// Modes train the same model on, because to make one takes far longer than to train it for some steps.
pacer::JsonLine train(CausalLm& model, const Mode& mode, const Batch& size, const World& world, double peak) {
  const at::Device device = world->device();
  start_memory_peaks(device);
  const auto optimizer = make_optimizer(mode, model);
  pacer::Session session(*model, *optimizer, world);
  use_hooks(mode, session, model);
  torch::manual_seed(static_cast<uint64_t>(world->rank()));
  const at::Tensor text = torch::randint(model->options.vocabulary(), {size.sequences, size.length + 1},
                                         at::TensorOptions(device).dtype(at::kLong));
  const at::Tensor ids = text.narrow(1, 0, size.length).contiguous();
  const at::Tensor targets = text.narrow(1, 1, size.length).contiguous();
  std::vector<double> times;
  at::Tensor loss;
  const LossOptions of_loss = LossOptions(size.loss).fp8(mode.has("head"));
  for (int step = 0; step < kUncountedSteps + kTimedSteps; ++step) {
    world->barrier();
    const double milliseconds = milliseconds_of(device, [&] {
      auto [x, y] = session.begin(ids, targets);
      loss = model->loss(x, y, of_loss);
      session.backward(loss);
      session.step();
    });
    if (step >= kUncountedSteps) times.push_back(milliseconds);
  }
  const double step_ms = largest(over_ranks(*world, spread_of(times).median));
  const auto peaks = memory_peaks(device);
  session.finish();
  for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
  const double tokens = static_cast<double>(size.sequences * size.length) / step_ms * 1e3;
  const double operations = tokens * model->operations_per_token(size.length);
  pacer::JsonLine line;
  line.add("mode", mode.name).add("world", world->world_size()).add("ms", rounded(step_ms, 2));
  line.add("tokens_s_gpu", std::llround(tokens)).add("tflops", rounded(operations * 1e-12, 1));
  line.add("of_product", rounded(operations / peak, 3));
  line.add("peak_GB", rounded(peaks.allocated, 2)).add("reserved_GB", rounded(peaks.reserved, 2));
  line.add("loss", rounded(loss.item<double>(), 4));
  return line;
}

// Operations a second of a bf16 product on random numbers.
double product_rate(at::Device device) {
  const auto options = at::TensorOptions(device).dtype(at::kBFloat16);
  const at::Tensor a = torch::randn({kProduct, kProduct}, options),
                   b = torch::randn({kProduct, kProduct}, options);
  const auto time = time_enqueued([&] { (void)at::matmul(a, b); }, 1, {25, 10, 2});
  return 2 * std::pow(static_cast<double>(kProduct), 3) / time.median * 1e3;
}

int run(const examples::OptionValues& given) {
  CausalLmOptions options = options_of(given["shape"].as<std::string>());
  if (given.count("layers") != 0) options.layers(number_in(given, "layers"));
  Batch size{number_in(given, "batch"), number_in(given, "sequence"), {}};
  if (given.count("chunk") != 0) size.loss.chunk_bytes(number_in(given, "chunk") << 20);
  std::vector<Mode> modes;
  for (const std::string& mode : examples::split(given["modes"].as<std::string>())) modes.emplace_back(mode);
  const World world = pacer::Communicator::from_environment();
  pacer::require<pacer::Unavailable>(
      world->device().is_cuda(),
      "the figures are of an NVIDIA GPU for each rank, and this machine or build has none");
  const double peak = product_rate(world->device());
  torch::manual_seed(0);
  CausalLm model(options);
  model->to(world->device(), at::kBFloat16);
  int64_t parameters = 0;
  for (const at::Tensor& parameter : model->parameters()) parameters += parameter.numel();
  if (world->rank() == 0) {
    print(pacer::JsonLine()
              .add("gpu", gpu_name())
              .add("product_tflops", rounded(peak * 1e-12, 1))
              .add("params_M", std::llround(static_cast<double>(parameters) * 1e-6))
              .add("sequences", size.sequences)
              .add("sequence", size.length));
  }
  for (const Mode& mode : modes) {
    const pacer::JsonLine line = train(model, mode, size, world, peak);
    if (world->rank() == 0) print(line);
  }
  world->barrier();
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand lm{"lm", "whole training steps of a language model, in tokens a second", kAbout, run};
  lm.options.add_options()                                                                         //
      ("shape", word("NAME")->default_value("qwen2.5-1.5b"), "or llama-3.1-8b, or small (110 M)")  //
      ("layers", whole_number(), "in the place of the shape's")                                    //
      ("batch", whole_number(16), "sequences of a rank")                                           //
      ("sequence", whole_number(1024), "tokens of a sequence")                                     //
      ("chunk", whole_number(), "MiB of logits at once; by default 1,536 rows")                    //
      ("modes", word("MODE,...")->default_value(kModes), "words joined by '+'");
  return lm;
}

}  // namespace bench::lm
