#include "models.h"

#include <functional>

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/padding.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/utils.h>

#include <pacer/core/error.h>

#include "convergence/model/gpt.h"

namespace scales {
namespace {

namespace nn = torch::nn;

class GptModel : public LanguageModel {
 public:
  explicit GptModel(int64_t vocabulary) {
    pacer::require(vocabulary <= convergence::kVocabulary, "the GPT reads bytes; its text has ", vocabulary,
                   " characters");
    convergence::GptConfig config;
    config.layers = 2;
    config.width = 96;
    config.positions = 64;
    gpt_ = register_module("gpt", convergence::Gpt(config));
  }
  torch::Tensor forward(const torch::Tensor& tokens) override { return gpt_->forward(tokens); }

 private:
  convergence::Gpt gpt_ = nullptr;
};

class GruModel : public LanguageModel {
 public:
  explicit GruModel(int64_t vocabulary) {
    constexpr int64_t kFeatures = 64, kHidden = 192;
    embedding_ = register_module("embedding", nn::Embedding(vocabulary, kFeatures));
    gru_ = register_module("gru", nn::GRU(nn::GRUOptions(kFeatures, kHidden).batch_first(true)));
    head_ = register_module("head", nn::Linear(kHidden, vocabulary));
  }
  torch::Tensor forward(const torch::Tensor& tokens) override {
    return head_->forward(std::get<0>(gru_->forward(embedding_->forward(tokens))));
  }

 private:
  nn::Embedding embedding_ = nullptr;
  nn::GRU gru_ = nullptr;
  nn::Linear head_ = nullptr;
};

class ConvModel : public LanguageModel {
 public:
  explicit ConvModel(int64_t vocabulary) {
    constexpr int64_t kChannels = 96, kLayers = 5;
    embedding_ = register_module("embedding", nn::Embedding(vocabulary, kChannels));
    for (int64_t i = 0; i < kLayers; ++i) {
      const auto options = nn::Conv1dOptions(kChannels, kChannels, kWidth).dilation(int64_t{1} << i);
      layers_.push_back(register_module("conv_" + std::to_string(i), nn::Conv1d(options)));
    }
    head_ = register_module("head", nn::Linear(kChannels, vocabulary));
  }
  torch::Tensor forward(const torch::Tensor& tokens) override {
    auto x = embedding_->forward(tokens).transpose(1, 2);  // (sequences, channels, length)
    for (size_t i = 0; i < layers_.size(); ++i) {
      const int64_t past = (kWidth - 1) << i;  // on the left only: no layer sees what follows
      x = x + torch::gelu(layers_[i]->forward(torch::constant_pad_nd(x, {past, 0})));
    }
    return head_->forward(x.transpose(1, 2));
  }

 private:
  static constexpr int64_t kWidth = 3;

  nn::Embedding embedding_ = nullptr;
  std::vector<nn::Conv1d> layers_;
  nn::Linear head_ = nullptr;
};

class EmbeddingModel : public LanguageModel {
 public:
  explicit EmbeddingModel(int64_t vocabulary) {
    constexpr int64_t kFeatures = 96, kHidden = 48;
    embedding_ = register_module("embedding", nn::Embedding(vocabulary, kFeatures));
    nn::init::normal_(embedding_->weight, 0, 0.1);
    hidden_ = register_module("hidden", nn::Linear(kWords * kFeatures, kHidden));
    head_ = register_module("head", nn::Linear(kHidden, vocabulary));
  }
  torch::Tensor forward(const torch::Tensor& tokens) override {
    const int64_t length = tokens.size(1);
    const auto words = torch::constant_pad_nd(embedding_->forward(tokens), {0, 0, kWords - 1, 0});
    std::vector<torch::Tensor> last;
    for (int64_t i = 0; i < kWords; ++i) last.push_back(words.narrow(1, i, length));
    return head_->forward(torch::gelu(hidden_->forward(torch::cat(last, 2))));
  }

 private:
  static constexpr int64_t kWords = 4;

  nn::Embedding embedding_ = nullptr;
  nn::Linear hidden_ = nullptr;
  nn::Linear head_ = nullptr;
};

}  // namespace

const std::vector<std::string>& model_names() {
  static const std::vector<std::string> names = {"gpt", "gru", "conv", "embedding"};
  return names;
}

TextUnit text_unit(const std::string& model) {
  return model == "embedding" ? TextUnit::word : TextUnit::character;
}

std::shared_ptr<LanguageModel> make_model(const std::string& name, int64_t vocabulary) {
  if (name == "gpt") return std::make_shared<GptModel>(vocabulary);
  if (name == "gru") return std::make_shared<GruModel>(vocabulary);
  if (name == "conv") return std::make_shared<ConvModel>(vocabulary);
  if (name == "embedding") return std::make_shared<EmbeddingModel>(vocabulary);
  throw pacer::InvalidArgument("there is no model '" + name + "'");
}

torch::Tensor loss_of(LanguageModel& model, const TokenBatch& batch) {
  const auto scores = model.forward(batch.first);
  return torch::cross_entropy_loss(scores.flatten(0, 1), batch.second.flatten());
}

}  // namespace scales
