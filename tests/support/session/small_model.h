// A small network with a residual stack, its data, and training loops over them: what the tests of the
// Session train. Everything is a function of seeds.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <torch/nn/functional/loss.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <pacer/modules/attention_window.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/transformer_layer.h>
#include <pacer/schedulers/layer_drop.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {

// The width is one that 8-bit products can have.
constexpr int64_t kVocabulary = 11, kWidth = 16, kFullLength = 16;

// Token ids [B, S] to logits [B, S, kVocabulary]; learned positions, dropout, `depth` residual blocks that
// hooks may act around, behind gates where there are any. Blocks are linear, with attention before them where
// the window is used, or `fused` transformer layers.
struct SmallModelImpl : torch::nn::Module {
  explicit SmallModelImpl(int64_t depth = 3, double dropout = 0.0, LayerDrop gates = nullptr,
                          bool fused = false)
      : tokens(register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth))),
        positions(register_module("positions", torch::nn::Embedding(kFullLength, kWidth))),
        drop(register_module("drop", torch::nn::Dropout(dropout))),
        head(register_module("head", torch::nn::Linear(kWidth, kVocabulary))),
        layer_drop(gates) {
    if (layer_drop) register_module("layer_drop", layer_drop);
    register_module("stack", stack);
    for (int64_t i = 0; i < depth; ++i) {
      if (fused) {
        auto options =
            modules::TransformerLayerOptions(kWidth, 2).ffn(32).dropout(dropout).causal(true).window(window);
        if (i % 2 == 1) {  // as of a language model
          options.normalization(Normalization::rms).activation(Activation::swiglu).bias(false);
          options.kv_heads(1).head_dim(16).rotary(100).qk_norm(true);
        }
        layers.emplace_back(options);
        stack->push_back(layers.back());
      } else {
        blocks.emplace_back(kWidth, kWidth);
        stack->push_back(blocks.back());
      }
      if (layer_drop) layer_drop->add(*stack->ptr(static_cast<size_t>(i)));
    }
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = tokens(ids) + positions(torch::arange(ids.size(1), ids.options()));
    for (size_t i = 0; i < stack->size(); ++i) {
      const auto residual = [this, i](const Tensor& h) {
        if (!layers.empty()) return layers[i](h);
        return h + torch::tanh(blocks[i](drop(uses_window ? attended(h) : h)));
      };
      const auto block = [&](const Tensor& h) { return stack->run(i, residual, h); };
      x = layer_drop ? layer_drop->gate(static_cast<int64_t>(i), x, block) : block(x);
    }
    return logit_scale == 1 ? head(x) : head(x) * logit_scale;
  }
  Tensor attended(const Tensor& h) const {
    const Tensor heads = h.unflatten(2, {2, kWidth / 2}).transpose(1, 2);
    return window.attend(heads, heads, heads).transpose(1, 2).flatten(2, 3);
  }
  Tensor loss(const Tensor& ids, const Tensor& targets) {
    return torch::nn::functional::cross_entropy(forward(ids).flatten(0, 1), targets.flatten());
  }

  torch::nn::Embedding tokens, positions;
  torch::nn::Dropout drop;
  torch::nn::Linear head;
  double logit_scale = 1;                       // a number that is in no checkpoint
  AttentionWindow window{WindowForm::sliding};  // of the fused layers; of the others, where that is set:
  bool uses_window = false;
  LayerDrop layer_drop;
  Blocks stack;
  std::vector<modules::Linear> blocks;            // of the stack, or
  std::vector<modules::TransformerLayer> layers;  // fused ones
};
TORCH_MODULE(SmallModel);

inline SmallModel small_model(double dropout = 0.0, LayerDrop gates = nullptr, int64_t depth = 3,
                              bool fused = false) {
  torch::manual_seed(1);
  return SmallModel(depth, dropout, gates, fused);
}
inline SmallModel small_model_with_gates(LayerDropOptions options, double dropout = 0.0, int64_t depth = 3) {
  return small_model(dropout, LayerDrop(options), depth);
}
// Half the layers from the first steps on.
inline LayerDropOptions early_drops() { return LayerDropOptions().theta_bar(0.3).gamma(1); }

// Batch number i: ids and targets, [batch, length] each, int64. The next token is a function of the last two.
inline std::pair<Tensor, Tensor> small_batch(int64_t i, int64_t batch = 2, int64_t length = kFullLength) {
  Tensor ids = torch::empty({batch, length + 1}, torch::kLong);
  auto* id = ids.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) {
    int64_t a = (7 * i + 3 * b) % kVocabulary, c = (5 * i + b + 1) % kVocabulary;
    for (int64_t s = 0; s <= length; ++s) {
      id[b * (length + 1) + s] = a;
      const int64_t next = (a + 2 * c + 1) % kVocabulary;
      a = c;
      c = next;
    }
  }
  return {ids.narrow(1, 0, length).contiguous(), ids.narrow(1, 1, length).contiguous()};
}

inline std::vector<Tensor> parameters_of(SmallModel& model) { return model->parameters(); }

}  // namespace pacer::testing
