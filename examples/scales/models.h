// Four kinds of small language model, each a function from tokens to scores of the token that follows. What
// matters here is how they differ: in how large gradients are from tensor to tensor, and in how many elements
// of a tensor a step concerns.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "text.h"

namespace scales {

class LanguageModel : public torch::nn::Module {
 public:
  // int64 (sequences, length) to (sequences, length, at least the vocabulary).
  virtual torch::Tensor forward(const torch::Tensor& tokens) = 0;
};

// "gpt", "gru", "conv" and "embedding".
const std::vector<std::string>& model_names();

// What a model reads: characters, but words where the table of embeddings is to be large.
TextUnit text_unit(const std::string& model);

// Draws initial values from LibTorch's default generator: call torch::manual_seed first.
//   gpt        the GPT of examples/convergence, 2 layers of width 96, its head tied to the embedding
//   gru        embedding, one recurrent layer, head
//   conv       embedding, five causal convolutions with a residual path, the n-th over steps of 2^n, head
//   embedding  the last four words' vectors side by side, one hidden layer, head: most parameters are words'
std::shared_ptr<LanguageModel> make_model(const std::string& name, int64_t vocabulary);

// Mean cross entropy in nats.
torch::Tensor loss_of(LanguageModel& model, const TokenBatch& batch);

}  // namespace scales
