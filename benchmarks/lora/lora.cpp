// What adapters cost: a decoder layer, and the memory of a stack of them.
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/cuda.h>
#include <torch/utils.h>

#include <pacer/modules/blocks.h>
#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/optimizers/fused_adam.h>

#include "subcommands.h"
#include "support/device.h"
#include "support/llama.h"  // of examples/
#include "support/table.h"

namespace bench::lora {
namespace {

constexpr const char* kAbout =
    R"(Measures what adapters cost: one decoder layer of LLaMA-7B's shapes over 8,192 tokens, frozen in
bf16, with adapters of rank 16 on all seven linear layers over bf16 and over 4 bits, in 16 bits and
in 8-bit floats, forward and forward + backward, beside each other in one run; and the memory of
whole training steps of a stack of such layers beside their formula. Prints JSON lines. On a CPU the
size is small, to see that it runs.
)";

using examples::LlamaLayer, examples::LlamaLayerImpl;

struct Shape {
  int64_t hidden, ffn, heads, batch, sequence;
};
constexpr Shape kLarge = {4096, 11008, 32, 4, 2048}, kSmall = {64, 160, 4, 2, 16};
constexpr int kUncounted = 5, kCounted = 25;
constexpr int64_t kRank = 16;
constexpr auto kType = torch::kBFloat16;

enum class Kind { frozen, lora, qlora, lora_in_fp8, qlora_in_fp8, full };
const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"frozen bf16",         "LoRA over bf16",     "LoRA over NF4",
                                    "LoRA over bf16, FP8", "LoRA over NF4, FP8", "full bf16"};
  return kNames[static_cast<int>(kind)];
}
bool is_over_nf4(Kind kind) { return kind == Kind::qlora || kind == Kind::qlora_in_fp8; }

// Null where the model computes in 16 bits.
std::shared_ptr<pacer::Fp8Scaling> scaling_of(torch::nn::Module& model, Kind kind) {
  if (kind != Kind::lora_in_fp8 && kind != Kind::qlora_in_fp8) return nullptr;
  return std::make_shared<pacer::Fp8Scaling>(model, pacer::Fp8Options().quantized_weights(true));
}

// The median of several times, after some that do not count.
double median_milliseconds(at::Device device, const std::function<void()>& f) {
  const auto timed = [&] { return milliseconds_of(device, f); };
  for (int i = 0; i < kUncounted; ++i) timed();
  return repeat({kCounted, kCounted, /*seconds=*/0}, timed).median;
}

// One decoder layer: RMS norms, causal attention without positions, SwiGLU, seven linear layers without bias.
LlamaLayer make_layer(const Shape& shape) {
  examples::LlamaConfig config;
  config.hidden = shape.hidden;
  config.intermediate = shape.ffn;
  config.heads = config.key_value_heads = shape.heads;
  return LlamaLayer(config);
}
torch::Tensor forward(LlamaLayer& layer, const torch::Tensor& x) {
  return layer(x, torch::Tensor(), torch::Tensor());
}

void make(torch::nn::Module& model, Kind kind, at::Device device, at::ScalarType adapters) {
  model.to(device, kType);
  if (kind == Kind::full) return;
  for (auto& parameter : model.parameters()) parameter.requires_grad_(false);
  const std::vector<std::string> targets = {"*_proj"};
  if (is_over_nf4(kind)) pacer::modules::quantize(model, pacer::modules::Nf4Options().targets(targets));
  if (kind == Kind::frozen) return;
  pacer::modules::add_lora(model, pacer::modules::LoraOptions(kRank).alpha(2 * kRank).targets(targets));
  for (const auto& item : pacer::modules::trainable(model)) item.value().set_data(item.value().to(adapters));
}

void time_layer(const Shape& shape, at::Device device, at::ScalarType adapters) {
  double frozen = 0;
  for (const Kind kind : {Kind::frozen, Kind::lora, Kind::qlora, Kind::lora_in_fp8, Kind::qlora_in_fp8}) {
    torch::manual_seed(1);
    LlamaLayer layer = make_layer(shape);
    make(*layer, kind, device, adapters);
    const auto options = torch::TensorOptions(device).dtype(kType);
    const auto x = torch::randn({shape.batch, shape.sequence, shape.hidden}, options).requires_grad_();
    const auto dy = torch::randn_like(x);
    const auto scaling = scaling_of(*layer, kind);
    const pacer::Fp8Scope scope(scaling);
    const double forward_ms = median_milliseconds(device, [&] {
      const torch::NoGradGuard no_grad;
      forward(layer, x);
      if (scaling) scaling->update();
    });
    const double step_ms = median_milliseconds(device, [&] {
      x.mutable_grad() = torch::Tensor();
      layer->zero_grad();
      forward(layer, x).backward(dy);
      if (scaling) scaling->update();
    });
    if (kind == Kind::frozen) frozen = step_ms;
    print(pacer::JsonLine()
              .add("layer", name_of(kind))
              .add("adapters", c10::toString(adapters))
              .add("forward_ms", rounded(forward_ms, 3))
              .add("step_ms", rounded(step_ms, 3))
              .add("of_frozen", rounded(step_ms / frozen, 3)));
  }
}

int64_t bytes_of(const std::vector<torch::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

// What a stack needs after two steps, beside the formula: weights, gradients and optimizer state, all of
// which stay between steps; and at most during a step.
void weigh_stack(const Shape& shape, int64_t layers, at::Device device) {
  for (const Kind kind : {Kind::full, Kind::lora, Kind::qlora, Kind::qlora_in_fp8}) {
    start_memory_peaks(device);
    const double before = memory_peaks(device).allocated;
    pacer::Blocks blocks;
    for (int64_t i = 0; i < layers; ++i) {
      LlamaLayer layer = make_layer(shape);
      make(*layer, kind, device, torch::kFloat);
      blocks->push_back(layer);
    }
    std::vector<torch::Tensor> trained;
    for (const auto& parameter : blocks->parameters()) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    pacer::FusedAdamW optimizer(trained, pacer::FusedAdamWOptions(1e-4));
    const auto scaling = scaling_of(*blocks, kind);
    const pacer::Fp8Scope scope(scaling);
    auto x = torch::randn({1, shape.sequence, shape.hidden}, torch::dtype(kType).device(device));
    for (int step = 0; step < 2; ++step) {
      auto y = x;
      for (size_t i = 0; i < blocks->size(); ++i)
        y = blocks->run(i, &LlamaLayerImpl::forward, y, torch::Tensor(), torch::Tensor());
      y.square().mean().backward();
      optimizer.step();
      if (scaling) scaling->update();
    }
    x = torch::Tensor();
    // Moments in 32 bits, and 16 bits of remainder for each bf16 parameter.
    int64_t state = 0;
    for (const auto& parameter : trained) {
      state += parameter.numel() * (parameter.scalar_type() == kType ? 10 : 8);
    }
    const double formula =
        1e-9 * static_cast<double>(bytes_of(blocks->parameters()) + bytes_of(blocks->buffers()) +
                                   bytes_of(trained) + state);
    const double peak = memory_peaks(device).allocated - before;
    start_memory_peaks(device);
    const double stays = memory_peaks(device).allocated - before;
    print(pacer::JsonLine()
              .add("memory", name_of(kind))
              .add("layers", layers)
              .add("stays_GB", rounded(stays, 3))
              .add("formula_GB", rounded(formula, 3))
              .add("of_formula", rounded(stays / formula, 3))
              .add("peak_GB", rounded(peak, 3)));
  }
}

int run(const examples::OptionValues&) {
  const bool on_gpu = torch::cuda::is_available();
  const at::Device device = on_gpu ? at::Device(torch::kCUDA, 0) : at::Device(torch::kCPU);
  const auto& shape = on_gpu ? kLarge : kSmall;
  for (const auto adapters : {torch::kBFloat16, torch::kFloat}) time_layer(shape, device, adapters);
  if (on_gpu) weigh_stack(shape, 4, device);
  return 0;
}

}  // namespace

Subcommand subcommand() {
  return {"lora", "a decoder layer with adapters over 16 and 4 bits, its time and memory", kAbout, run};
}

}  // namespace bench::lora
