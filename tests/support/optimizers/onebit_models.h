// Small models of five kinds, with data that is a function of seeds, on which 1-bit optimizers are compared
// with those in full precision. Each has tensors, or rows of one, whose true gradient is zero.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {

struct OneBitModel {
  std::string name;
  double rate;       // of Adam
  double lamb_rate;  // of LAMB
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  // The logits [n, classes] of inputs, and a batch of inputs and classes.
  std::function<Tensor(torch::nn::Module&, const Tensor&)> logits;
  std::function<std::pair<Tensor, Tensor>(at::Generator&, int64_t)> batch;
  // Of a model: what has noise for a gradient, or none at all.
  std::function<std::vector<Tensor>(torch::nn::Module&)> noise;
};

namespace onebit_models {

namespace nn = torch::nn;
constexpr int64_t kClasses = 10, kSide = 8, kWords = 32, kLength = 12, kWide = 32, kRare = 400;

inline at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

// ---- Images: a prototype of each class, and noise. ----

inline std::pair<Tensor, Tensor> images(at::Generator& draw, int64_t n) {
  at::Generator fixed = generator(1);
  const Tensor prototypes = at::randn({kClasses, 1, kSide, kSide}, fixed);
  const Tensor classes = at::randint(kClasses, {n}, draw, at::kLong);
  return {prototypes.index_select(0, classes) + at::randn({n, 1, kSide, kSide}, draw), classes};
}

// Convolutions with a bias before batch norm, which takes it out again.
struct Convolutions : nn::Module {
  Convolutions() {
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)));
    norm = register_module("norm", nn::BatchNorm2d(16));
    second = register_module("second", nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1).stride(2)));
    norm2 = register_module("norm2", nn::BatchNorm2d(32));
    last = register_module("last", nn::Linear(32 * 4, kClasses));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = at::max_pool2d(norm(first(x)).relu(), 2);
    return last(norm2(second(y)).relu().flatten(1));
  }
  nn::Conv2d first{nullptr}, second{nullptr};
  nn::BatchNorm2d norm{nullptr}, norm2{nullptr};
  nn::Linear last{nullptr};
};

// ---- Text: what follows a word is one of two, in 8 of 10 cases the first. ----

inline std::pair<Tensor, Tensor> text(at::Generator& draw, int64_t n) {
  at::Generator fixed = generator(2);
  const Tensor next = at::randperm(kWords, fixed, at::kLong), other = at::randperm(kWords, fixed, at::kLong);
  std::vector<Tensor> words = {at::randint(kWords, {n}, draw, at::kLong)};
  for (int64_t t = 0; t < kLength; ++t) {
    const Tensor likely = at::rand({n}, draw) < 0.8;
    words.push_back(
        at::where(likely, next.index_select(0, words.back()), other.index_select(0, words.back())));
  }
  const Tensor all = at::stack(words, 1);
  return {all.narrow(1, 0, kLength), all.narrow(1, 1, kLength).reshape(-1)};
}

// Attention with separate projections and biases, of which the key's has no gradient, or with a fused one.
struct Layer : nn::Module {
  explicit Layer(bool is_fused) {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWide})));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWide})));
    if (is_fused) {
      qkv = register_module("qkv", nn::Linear(kWide, 3 * kWide));
    } else {
      query = register_module("query", nn::Linear(kWide, kWide));
      key = register_module("key", nn::Linear(kWide, kWide));
      value = register_module("value", nn::Linear(kWide, kWide));
    }
    out = register_module("out", nn::Linear(kWide, kWide));
    up = register_module("up", nn::Linear(kWide, 2 * kWide));
    down = register_module("down", nn::Linear(2 * kWide, kWide));
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = norm(x);
    std::vector<Tensor> parts =
        qkv.is_empty() ? std::vector<Tensor>{query(h), key(h), value(h)} : qkv(h).chunk(3, -1);
    for (Tensor& part : parts) part = part.view({x.size(0), x.size(1), 4, -1}).transpose(1, 2);
    const Tensor attended =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    const Tensor y = x + out(attended.transpose(1, 2).flatten(2));
    return y + down(at::gelu(up(norm2(y))));
  }
  nn::LayerNorm norm{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, query{nullptr}, key{nullptr}, value{nullptr}, out{nullptr}, up{nullptr},
      down{nullptr};
};
struct Transformer : nn::Module {
  Transformer(int64_t layers, bool is_fused) {
    words = register_module("words", nn::Embedding(kWords, kWide));
    places = register_module("places", nn::Embedding(2 * kLength, kWide));  // half of them are never reached
    for (int64_t i = 0; i < layers; ++i) {
      all.push_back(register_module("layer" + std::to_string(i), std::make_shared<Layer>(is_fused)));
    }
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWide})));
    head = register_module("head", nn::Linear(nn::LinearOptions(kWide, kWords).bias(false)));
  }
  Tensor forward(const Tensor& x) {
    Tensor h = words(x) + places->weight.narrow(0, 0, x.size(1));
    for (const auto& layer : all) h = layer->forward(h);
    return head(norm(h)).flatten(0, 1);
  }
  nn::Embedding words{nullptr}, places{nullptr};
  std::vector<std::shared_ptr<Layer>> all;
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
};

struct Recurrent : nn::Module {
  Recurrent() {
    words = register_module("words", nn::Embedding(kWords, kWide));
    gru = register_module("gru", nn::GRU(nn::GRUOptions(kWide, 40).batch_first(true)));
    head = register_module("head", nn::Linear(40, kWords));
  }
  Tensor forward(const Tensor& x) { return head(std::get<0>(gru(words(x)))).flatten(0, 1); }
  nn::Embedding words{nullptr};
  nn::GRU gru{nullptr};
  nn::Linear head{nullptr};
};

// ---- Bags of words that are the rarer the larger their number; the last ones never occur. ----

inline std::pair<Tensor, Tensor> bags(at::Generator& draw, int64_t n) {
  at::Generator fixed = generator(3);
  const Tensor of_class = at::randn({kRare, 4}, fixed);
  const Tensor rank = at::rand({n, 8}, draw).mul(std::log(0.9 * kRare)).exp().sub(1);
  const Tensor words = rank.to(at::kLong).clamp_max(9 * kRare / 10 - 1);
  return {words, of_class.index_select(0, words.flatten()).view({n, 8, 4}).mean(1).argmax(1)};
}
struct Embedded : nn::Module {
  Embedded() {
    words = register_module("words", nn::Embedding(kRare, 16));
    middle = register_module("middle", nn::Linear(16, 24));
    last = register_module("last", nn::Linear(24, 4));
  }
  Tensor forward(const Tensor& x) { return last(middle(words(x).mean(1)).relu()); }
  nn::Embedding words{nullptr};
  nn::Linear middle{nullptr}, last{nullptr};
};

template <class Model, class... Arguments>
OneBitModel model_of(const std::string& name, double rate, double lamb_rate,
                     std::pair<Tensor, Tensor> (*batch)(at::Generator&, int64_t),
                     std::vector<Tensor> (*noise)(Model&), Arguments... arguments) {
  return {name,
          rate,
          lamb_rate,
          [=] { return std::make_shared<Model>(arguments...); },
          [](nn::Module& model, const Tensor& x) { return static_cast<Model&>(model).forward(x); },
          batch,
          [noise](nn::Module& model) { return noise(static_cast<Model&>(model)); }};
}

}  // namespace onebit_models

inline std::vector<OneBitModel> all_onebit_models() {
  using namespace onebit_models;
  const auto never_reached = [](Transformer& m) {
    return std::vector<Tensor>{m.places->weight.narrow(0, kLength, kLength)};
  };
  return {
      model_of<Convolutions>("conv + batch norm", 3e-3, 0.01, images,
                             [](Convolutions& m) {
                               return std::vector<Tensor>{m.first->bias, m.second->bias};
                             }),
      model_of<Transformer>(
          "attention, separate biases", 3e-3, 0.01, text,
          [](Transformer& m) {
            return std::vector<Tensor>{m.all[0]->key->bias, m.places->weight.narrow(0, kLength, kLength)};
          },
          int64_t{1}, false),
      model_of<Transformer>("GPT", 3e-3, 0.01, text, +never_reached, int64_t{2}, true),
      model_of<Recurrent>("GRU", 5e-3, 0.015, text, [](Recurrent&) { return std::vector<Tensor>{}; }),
      model_of<Embedded>("embeddings", 5e-3, 0.015, bags,
                         [](Embedded& m) {
                           return std::vector<Tensor>{m.words->weight.narrow(0, 9 * kRare / 10, kRare / 10)};
                         }),
  };
}

struct OneBitOutcome {
  double loss;      // of the last steps
  double accuracy;  // in evaluation mode, of examples not seen
  double movement;  // of the element without a true gradient that moved furthest
};

// Trains a new model with what `make` makes of its parameters.
inline OneBitOutcome train_onebit_model(
    const OneBitModel& kind,
    const std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<Tensor>&)>& make,
    uint64_t seed, int64_t steps, int64_t examples = 16) {
  torch::manual_seed(seed);
  const auto model = kind.make();
  const auto optimizer = make(model->parameters());
  std::vector<Tensor> noise = kind.noise(*model);
  std::vector<Tensor> start;
  for (const Tensor& tensor : noise) start.push_back(tensor.detach().clone());
  at::Generator draw = onebit_models::generator(1000 + seed);
  const int64_t counted = steps / 6;
  OneBitOutcome outcome{0, 0, 0};
  for (int64_t step = 0; step < steps; ++step) {
    const auto [x, y] = kind.batch(draw, examples);
    optimizer->zero_grad();
    const Tensor loss = at::cross_entropy_loss(kind.logits(*model, x), y);
    loss.backward();
    optimizer->step();
    if (step >= steps - counted) outcome.loss += loss.item<double>() / static_cast<double>(counted);
  }
  const torch::NoGradGuard no_grad;
  model->eval();
  at::Generator unseen = onebit_models::generator(7);
  const auto [x, y] = kind.batch(unseen, 256);
  outcome.accuracy = kind.logits(*model, x).argmax(1).eq(y).to(at::kDouble).mean().item<double>();
  noise = kind.noise(*model);
  for (size_t i = 0; i < noise.size(); ++i)
    outcome.movement = std::max(outcome.movement, distance(noise[i], start[i]));
  return outcome;
}

}  // namespace pacer::testing
