// Two ways to make training steps cheaper, together: sequences that start short (SequenceLength) and layers
// that are skipped more and more often (LayerDrop), on a small stack of attention blocks with a mask. Early
// steps are cheap because sequences are short, late ones because layers are missing.
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/program.h"

namespace {

constexpr int64_t kVocabulary = 32, kWidth = 64, kHeads = 4, kDepth = 8, kBatch = 8, kLength = 128;
constexpr int64_t kSteps = 150;

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm norm{register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{kWidth}))};
  torch::nn::Linear qkv{register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth))};
  torch::nn::Linear output{register_module("output", torch::nn::Linear(kWidth, kWidth))};

  // x: [B, S, kWidth]; mask: [B, 1, S, S], true where a position may look.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& mask) {
    const int64_t batch = x.size(0), length = x.size(1);
    const auto heads =
        qkv(norm(x)).view({batch, length, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const auto mixed = torch::scaled_dot_product_attention(heads[0], heads[1], heads[2], mask);
    return x + output(torch::gelu(mixed.transpose(1, 2).reshape({batch, length, kWidth})));
  }
};
TORCH_MODULE(Block);

struct StackImpl : torch::nn::Module {
  torch::nn::Embedding tokens{register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth))};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(kWidth, kVocabulary))};
  std::vector<Block> blocks;
  pacer::LayerDrop layer_drop;

  explicit StackImpl(const pacer::LayerDrop& gates) : layer_drop(register_module("layer_drop", gates)) {
    for (int64_t i = 0; i < kDepth; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
      layer_drop->add(*blocks.back());
    }
  }
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& mask) {
    torch::Tensor x = tokens(ids);
    for (int64_t i = 0; i < kDepth; ++i) {
      x = layer_drop->gate(i, x, [&](const torch::Tensor& h) { return blocks[i]->forward(h, mask); });
    }
    return head(x);
  }
};
TORCH_MODULE(Stack);

void run() {
  torch::manual_seed(1);
  torch::set_num_threads(1);  // so small a model gains nothing from a second one, and times are steadier
  const pacer::LayerDrop layer_drop(pacer::LayerDropOptions().theta_bar(0.5).gamma(4.0 / kSteps));
  Stack model(layer_drop);
  pacer::FusedAdamW optimizer(model->named_parameters(), pacer::FusedAdamWOptions(2e-3));
  pacer::Session session(*model, optimizer);
  session.use(pacer::SequenceLength(pacer::SequenceLengthOptions(16, kLength).ramp_steps(kSteps / 2)))
      .use(layer_drop);

  const auto causal = torch::ones({kLength, kLength}, torch::kBool).tril();
  const auto mask = causal.expand({kBatch, 1, kLength, kLength});
  std::printf("steps        tokens per sequence   layers of %lld   ms per step   loss\n",
              static_cast<long long>(kDepth));
  double milliseconds = 0, kept = 0, length = 0, loss_sum = 0;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    // A walk through the vocabulary with steps of one or two: next to learn is which way each token goes.
    const auto walk = torch::randint(1, 3, {kBatch, kLength + 1}, torch::kInt64).cumsum(1) % kVocabulary;
    auto [x, y, m] = session.begin(walk.narrow(1, 0, kLength), walk.narrow(1, 1, kLength), mask);
    const auto loss = torch::cross_entropy_loss(model->forward(x, m).flatten(0, 1), y.reshape({-1}));
    kept += layer_drop->kept_layers(session.progress());
    session.backward(loss);
    session.step();
    milliseconds +=
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    length += static_cast<double>(x.size(1));
    loss_sum += loss.item<double>();
    constexpr int64_t kWindow = kSteps / 5;
    if (step % kWindow != 0) continue;
    std::printf("%3lld to %3lld   %19.0f   %11.1f   %11.2f   %.3f\n",
                static_cast<long long>(step - kWindow + 1), static_cast<long long>(step), length / kWindow,
                kept / kWindow, milliseconds / kWindow, loss_sum / kWindow);
    milliseconds = kept = length = loss_sum = 0;
  }
  session.finish();
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a small stack of attention blocks on sequences that start short, with layers that are skipped\n"
      "more and more often, and says what a step takes.\n";
  return examples::run_program(argument_count, arguments, kAbout, run);
}
