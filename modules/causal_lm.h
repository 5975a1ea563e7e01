// A decoder as Llama, Qwen2 and Qwen3 are: an embedding, transformer layers with RMS norms, rotary positions and SwiGLU,
// a norm and a head. checkpoints/causal_lm_files.h reads and writes it as Hugging Face has it.
//
//   pacer::modules::CausalLm model(pacer::modules::CausalLmOptions(32'000, 768, 12, 12).kv_heads(4));
//   session.use(pacer::Recompute(model->layers));
//   auto loss = model->loss(ids, targets);   // targets: the ids that follow
#pragma once

#include <cstdint>
#include <optional>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <pacer/core/option.h>
#include <pacer/modules/blocks.h>
#include <pacer/modules/linear_cross_entropy.h>
#include <pacer/modules/rms_norm.h>
#include <pacer/modules/rotary.h>
#include <pacer/modules/transformer_layer.h>
#include <pacer/modules/with_head.h>

namespace pacer::modules {

struct CausalLmOptions {
 private:
  TransformerLayerOptions layer_;

 public:
  // How many different ids there are, the width of a layer, how many layers, and their heads of queries.
  CausalLmOptions(int64_t vocabulary, int64_t hidden, int64_t layers, int64_t heads);
  // What every layer is made of, its positions aside.
  const TransformerLayerOptions& layer() const { return layer_; }

  TORCH_ARG(int64_t, vocabulary);
  TORCH_ARG(int64_t, layers);
  PACER_OPTION_OF(CausalLmOptions, layer_, hidden);
  PACER_OPTION_OF(CausalLmOptions, layer_, heads);
  PACER_OPTION_OF(CausalLmOptions, layer_, kv_heads);
  PACER_OPTION_OF(CausalLmOptions, layer_, head_dim);
  PACER_OPTION_OF(CausalLmOptions, layer_, qk_norm);
  PACER_OPTION_OF(CausalLmOptions, layer_, window);
  // Features between the products of a layer's network. As constructed: 8/3 of hidden, rounded up to a multiple of 64,
  // which has as many weights as 4 * hidden without a gate (arXiv:2302.13971).
  PACER_OPTION_OF(CausalLmOptions, layer_, ffn);
  // Whether queries, keys and values have biases, as Qwen2 has them; unset: they have none.
  PACER_OPTION_OF(CausalLmOptions, layer_, qkv_bias);
  // Added to the mean square in all norms.
  PACER_OPTION_OF(CausalLmOptions, layer_, eps);
  // The base of the rotary positions; see Rotary.
  TORCH_ARG(double, theta) = 10'000;
  // How these reach beyond the sequences of their first training, as Llama 3.1's do; unset: they do not.
  TORCH_ARG(std::optional<RotaryScaling>, scaling);
  // Whether the head's weight is the embedding's.
  TORCH_ARG(bool, tied) = false;
  // The standard deviation of all matrices at first, >= 0.
  TORCH_ARG(double, init_std) = 0.02;
  // Each layer gives the memory of its parameters back as soon as it is made, for a model that is larger than a machine; see
  // modules/deferred.h. Shards gives them values.
  TORCH_ARG(bool, deferred) = false;
};

class CausalLmImpl : public torch::nn::Cloneable<CausalLmImpl>, public WithHead {
 public:
  // Throws InvalidArgument for sizes below 1 and what TransformerLayer refuses.
  explicit CausalLmImpl(const CausalLmOptions& options);

  void reset() override;
  // Draws every matrix anew from N(0, init_std^2), by LibTorch's generator; biases are 0 and the weights of norms 1, as
  // transformers has it for these models. Adapters and weights in 4 bits stay, and so do deferred layers without values.
  void reset_parameters();
  // The same for a part of the model, such as a layer whose parameters were deferred:
  //   ShardsOptions().materialize(seeded_blocks(seed, [&](torch::nn::Module& layer) { model->reset_parameters(layer); }))
  void reset_parameters(torch::nn::Module& part) const;

  // ids [batch, sequence] in Long -> logits [batch, sequence, vocabulary], in the dtype of the weights or of autocast.
  // The head computes in it also under Precision::fp8.
  at::Tensor forward(const at::Tensor& ids);
  // The same up to the last norm, which is in it: [batch, sequence, hidden].
  at::Tensor hidden_states(const at::Tensor& ids);
  // The mean cross entropy of the targets [batch, sequence] in Long, fp32 [], without the logits in memory. Position i
  // predicts targets[i]: give ids one place further on. See linear_cross_entropy, also for errors.
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets,
                  const LinearCrossEntropyOptions& options = {});

  // The parts of these, for loops that call them one by one, as Pipeline does: what comes before the layers, layer i
  // (from 0), and what comes behind them; x [batch, sequence, hidden].
  at::Tensor embed(const at::Tensor& ids);
  at::Tensor run_layer(size_t i, const at::Tensor& x);
  at::Tensor loss_behind_layers(const at::Tensor& x, const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

  // The weight of the head [vocabulary, hidden]: the embedding's where it is tied.
  const at::Tensor& head_weight() const override { return head ? head->weight : embedding->weight; }

  // Floating-point operations that forward and backward of one token take in sequences of this length, for the share of
  // a device's peak: 6 N + 12 * layers * heads * head_dim * sequence (Chowdhery et al., arXiv:2204.02311, appendix B),
  // where N counts the elements of all matrices that a token is multiplied with, so not those of an embedding that is
  // only looked up. As there, attention counts for all of the sequence, and what is computed again does not count.
  // Throws InvalidArgument for a sequence below 1.
  double operations_per_token(int64_t sequence) const;

  CausalLmOptions options;
  torch::nn::Embedding embedding = nullptr;
  Blocks layers;                     // of TransformerLayer
  RmsNorm norm = nullptr;            // behind the layers
  torch::nn::Linear head = nullptr;  // without bias; null where it is tied
  Rotary rotary;                     // of all layers; a clone shares it, as it does the window
};
TORCH_MODULE(CausalLm);

}  // namespace pacer::modules
