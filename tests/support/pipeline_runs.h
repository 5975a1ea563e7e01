// A small language model trained as a whole by one rank, and by pipelines of threads as ranks: what the tests
// of Pipeline compare.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/ranks.h"

namespace pacer::testing::pipelines {

using torch::Tensor;

constexpr int64_t kWidth = 16, kWords = 11;

// Pre-norm, with a mean over all earlier positions in the place of attention.
struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        mix(register_module("mix", torch::nn::Linear(kWidth, kWidth))),
        up(register_module("up", torch::nn::Linear(kWidth, 2 * kWidth))),
        down(register_module("down", torch::nn::Linear(2 * kWidth, kWidth))) {}
  Tensor forward(Tensor x) {
    const Tensor y = x + mix(norm(x)).cumsum(1) / 8;
    return y + down(torch::gelu(up(norm(y))));
  }
  torch::nn::LayerNorm norm;
  torch::nn::Linear mix, up, down;
};
TORCH_MODULE(Block);

struct LanguageModelImpl : torch::nn::Module {
  explicit LanguageModelImpl(int64_t depth, bool is_tied = false)
      : embedding(register_module("embedding", torch::nn::Embedding(kWords, kWidth))) {
    register_module("blocks", blocks);
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block());
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    if (is_tied) return;
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWords).bias(false)));
  }
  Tensor embed(Tensor tokens) { return embedding(tokens); }
  Tensor loss(Tensor x, Tensor targets) {
    const Tensor logits = torch::linear(norm(x), head ? head->weight : embedding->weight);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  }
  Tensor forward(Tensor tokens, Tensor targets) {
    Tensor x = embed(tokens);
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &BlockImpl::forward, x);
    return loss(x, targets);
  }
  torch::nn::Embedding embedding;
  Blocks blocks;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(LanguageModel);

// Copies the gradients that the optimizer is about to see, by name.
class GradientCopies : public Hook {
 public:
  using Copies = std::map<std::string, Tensor>;
  GradientCopies(LanguageModel model, std::shared_ptr<std::vector<Copies>> steps)
      : model_(std::move(model)), steps_(std::move(steps)) {}
  std::string hook_name() const override { return "gradient_copies"; }
  Slot slot() const override { return Slot::optimize; }
  void gradients_ready(const Progress&) override {
    Copies copies;
    for (const auto& item : model_->named_parameters()) {
      if (item.value().grad().defined()) copies.emplace(item.key(), item.value().grad().clone());
    }
    steps_->push_back(std::move(copies));
  }

 private:
  LanguageModel model_;
  std::shared_ptr<std::vector<Copies>> steps_;
};

struct Setup {
  int64_t depth = 6, steps = 3, micro_batches = 4, rows = 2;  // rows of a micro-batch
  bool is_tied = false;
  std::function<void(Session&, LanguageModel&)> use = [](Session&, LanguageModel&) {};
  std::function<std::unique_ptr<torch::optim::Optimizer>(NamedParameters)> optimizer =
      [](NamedParameters parameters) {
        return std::make_unique<FusedAdamW>(std::move(parameters), FusedAdamWOptions(0.01));
      };
  PipelineOptions options = PipelineOptions().first({"embedding"}).last({"norm", "head"});
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

// What one run leaves; of a pipeline all ranks' together.
struct Result {
  std::vector<GradientCopies::Copies> gradients;  // by step
  std::map<std::string, Tensor> weights;
  std::vector<double> losses, norms;
  double evaluated = 0;
};

inline std::pair<Tensor, Tensor> batch_of(int64_t rows, int64_t step, int64_t replica = 0,
                                          int64_t length = 12) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 * step + replica));
  const Tensor text = torch::randint(kWords, {rows, length + 1}, generator);
  return {text.narrow(1, 0, length).contiguous(), text.narrow(1, 1, length).contiguous()};
}

inline LanguageModel make_model(const Setup& setup) {
  torch::manual_seed(4);
  return LanguageModel(setup.depth, setup.is_tied);
}

// What one rank is and does; tests of mistakes change one of several.
struct PipelineRank {
  PipelineRank(const Setup& own, const PipelineShape& plan, int stages, std::shared_ptr<Communicator> world,
               LanguageModel own_model)
      : setup(own),
        model(std::move(own_model)),
        grid(world, stages),
        pipeline(*model, model->blocks, &BlockImpl::forward, grid, plan, setup.options),
        optimizer(setup.optimizer(pipeline.named_parameters())),
        session(std::make_unique<Session>(*model, *optimizer, world)) {
    session->use(pipeline).use(GradientCopies(model, gradients));
    setup.use(*session, model);
  }

  // Forward and backward of a step; Session::step() is for the caller.
  Tensor pass(const Tensor& x, const Tensor& y) {
    return pipeline.step(
        *session, x, y, [this](Tensor tokens) { return model->embed(tokens); },
        [this](Tensor h, Tensor targets) { return model->loss(h, targets); });
  }
  std::pair<Tensor, Tensor> batch(int64_t step) const {
    return batch_of(setup.rows * setup.micro_batches, step, grid.replicas()->rank());
  }
  void step(int64_t number) {
    const auto [x, y] = batch(number);
    losses.push_back(pass(x, y).item<double>());
    session->step();
  }
  double evaluate() {
    const auto [x, y] = batch_of(setup.rows * setup.micro_batches, 99);
    return pipeline
        .evaluate(
            x, y, [this](Tensor tokens) { return model->embed(tokens); },
            [this](Tensor h, Tensor targets) { return model->loss(h, targets); })
        .item<double>();
  }
  // Of the parameters that this rank updates.
  std::map<std::string, Tensor> weights() const {
    std::map<std::string, Tensor> all;
    for (const auto& item : pipeline.named_parameters()) all[item.key()] = item.value().detach().clone();
    return all;
  }

  Setup setup;
  LanguageModel model;
  Grid grid;
  Pipeline pipeline;
  std::shared_ptr<std::vector<GradientCopies::Copies>> gradients =
      std::make_shared<std::vector<GradientCopies::Copies>>();
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<Session> session;
  std::vector<double> losses;
};

// By `replicas` ranks that each have the whole model, with accumulation.
inline Result run_whole(const Setup& setup, int replicas = 1) {
  const auto worlds = Communicator::in_process(replicas, CommunicatorOptions().timeout(setup.timeout));
  std::vector<LanguageModel> models;
  for (int rank = 0; rank < replicas; ++rank) models.push_back(make_model(setup));
  std::vector<Result> results(static_cast<size_t>(replicas));
  const auto messages = run_ranks(replicas, [&](int rank) {
    LanguageModel& model = models[static_cast<size_t>(rank)];
    Result& result = results[static_cast<size_t>(rank)];
    const auto gradients = std::make_shared<std::vector<GradientCopies::Copies>>();
    const auto optimizer = setup.optimizer(model->named_parameters());
    Session session(*model, *optimizer, worlds[static_cast<size_t>(rank)]);
    session.use(GradientAccumulation(setup.micro_batches).weight_by_tokens(setup.options.weight_by_tokens()));
    session.use(GradientCopies(model, gradients));
    setup.use(session, model);
    const int64_t rows = setup.rows;
    for (int64_t step = 0; step < setup.steps; ++step) {
      const auto [x, y] = batch_of(rows * setup.micro_batches, step, rank);
      double loss = 0;
      for (int64_t k = 0; k < setup.micro_batches; ++k) {
        auto [tokens, targets] = session.begin(x.narrow(0, k * rows, rows), y.narrow(0, k * rows, rows));
        const Tensor own = model->forward(tokens, targets);
        session.backward(own);
        session.step();
        loss += own.item<double>() / static_cast<double>(setup.micro_batches);
      }
      result.losses.push_back(loss);
    }
    const auto [x, y] = batch_of(rows * setup.micro_batches, 99);
    result.evaluated =
        session.evaluate([&, data = x, target = y] { return model->forward(data, target); }).item<double>();
    session.finish();
    result.gradients = *gradients;
    for (const auto& item : model->named_parameters()) {
      result.weights[item.key()] = item.value().detach().clone();
    }
  });
  REQUIRE(first_of(messages) == "");
  return results.front();
}

// What all ranks have, put together; replicas have the same.
inline Result together(const std::vector<std::unique_ptr<PipelineRank>>& ranks) {
  Result all;
  for (const auto& rank : ranks) {
    all.gradients.resize(rank->gradients->size());
    for (size_t step = 0; step < all.gradients.size(); ++step) {
      for (const auto& [name, gradient] : (*rank->gradients)[step]) {
        const auto [found, is_new] = all.gradients[step].emplace(name, gradient);
        REQUIRE((is_new || found->second.equal(gradient)));
      }
    }
    for (const auto& [name, weight] : rank->weights()) {
      const auto [found, is_new] = all.weights.emplace(name, weight);
      REQUIRE((is_new || found->second.equal(weight)));
    }
  }
  all.losses = ranks.front()->losses;
  return all;
}

// By `replicas` pipelines of `stages`.
inline Result run_piped(const Setup& setup, const PipelineShape& plan, int stages, int replicas = 1) {
  const int count = stages * replicas;
  const auto worlds = Communicator::in_process(count, CommunicatorOptions().timeout(setup.timeout));
  std::vector<LanguageModel> models;  // one after the other, because they share a random generator
  for (int rank = 0; rank < count; ++rank) models.push_back(make_model(setup));
  std::vector<std::unique_ptr<PipelineRank>> ranks(static_cast<size_t>(count));
  std::vector<double> evaluated(static_cast<size_t>(count));
  const auto messages = run_ranks(count, [&](int r) {
    const auto at = static_cast<size_t>(r);
    ranks[at] = std::make_unique<PipelineRank>(setup, plan, stages, worlds[at], models[at]);
    for (int64_t step = 0; step < setup.steps; ++step) ranks[at]->step(step);
    evaluated[at] = ranks[at]->evaluate();
    ranks[at]->session->finish();
  });
  REQUIRE(first_of(messages) == "");
  Result all = together(ranks);
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (r % static_cast<size_t>(replicas) == 0) REQUIRE(ranks[r]->losses == all.losses);
    REQUIRE(evaluated[r] == evaluated[0]);
  }
  all.evaluated = evaluated[0];
  return all;
}

// The first name whose tensors differ; "" if none does.
inline std::string difference(const std::map<std::string, Tensor>& a,
                              const std::map<std::string, Tensor>& b) {
  for (const auto& [name, tensor] : a) {
    if (b.count(name) == 0) return name + " is missing";
    if (!tensor.equal(b.at(name))) return name;
  }
  return a.size() == b.size() ? "" : "more tensors than there should be";
}

inline void require_same(const Result& whole, const Result& piped) {
  REQUIRE(whole.gradients.size() == piped.gradients.size());
  for (size_t step = 0; step < whole.gradients.size(); ++step) {
    INFO("gradients of step " << step);
    REQUIRE(difference(whole.gradients[step], piped.gradients[step]) == "");
  }
  REQUIRE(difference(whole.weights, piped.weights) == "");
}

}  // namespace pacer::testing::pipelines
