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
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWords).bias(false)));
    if (is_tied) head->weight = head->register_parameter("weight", embedding->weight);
  }
  Tensor embed(Tensor tokens) { return embedding(tokens); }
  Tensor loss(Tensor x, Tensor targets) {
    return torch::nn::functional::cross_entropy(head(norm(x)).flatten(0, 1), targets.flatten());
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

// Of this rank's part of the model.
inline void keep_weights(const LanguageModel& model, const SessionParts* /*parts*/,
                         const NamedParameters& own, Result& result) {
  (void)model;
  for (const auto& item : own) result.weights[item.key()] = item.value().detach().clone();
}

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
    session.use(GradientAccumulation(setup.micro_batches)).use(GradientCopies(model, gradients));
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
    keep_weights(model, nullptr, model->named_parameters(), result);
  });
  REQUIRE(first_of(messages) == "");
  return results.front();
}

// By `replicas` pipelines. Calls `f` with each rank's Session and Pipeline before the first step.
inline Result run_piped(const Setup& setup, const PipelineShape& plan, int stages, int replicas = 1,
                        std::vector<std::string>* errors = nullptr) {
  const int ranks = stages * replicas;
  const auto worlds = Communicator::in_process(ranks, CommunicatorOptions().timeout(setup.timeout));
  std::vector<LanguageModel> models;
  for (int rank = 0; rank < ranks; ++rank) models.push_back(make_model(setup));
  std::vector<Result> results(static_cast<size_t>(ranks));
  const auto messages = run_ranks(ranks, [&](int rank) {
    LanguageModel& model = models[static_cast<size_t>(rank)];
    Result& result = results[static_cast<size_t>(rank)];
    const auto gradients = std::make_shared<std::vector<GradientCopies::Copies>>();
    const Grid grid(worlds[static_cast<size_t>(rank)], stages);
    const Pipeline pipeline(*model, model->blocks, &BlockImpl::forward, grid, plan, setup.options);
    const auto optimizer = setup.optimizer(pipeline.named_parameters());
    Session session(*model, *optimizer, worlds[static_cast<size_t>(rank)]);
    session.use(pipeline).use(GradientCopies(model, gradients));
    setup.use(session, model);
    const auto first = [&](Tensor tokens) { return model->embed(tokens); };
    const auto last = [&](Tensor x, Tensor targets) { return model->loss(x, targets); };
    const int64_t rows = setup.rows * setup.micro_batches;
    for (int64_t step = 0; step < setup.steps; ++step) {
      const auto [x, y] = batch_of(rows, step, grid.replicas()->rank());
      result.losses.push_back(pipeline.step(session, x, y, first, last).item<double>());
      session.step();
    }
    const auto [x, y] = batch_of(rows, 99);
    result.evaluated = pipeline.evaluate(x, y, first, last).item<double>();
    session.finish();
    result.gradients = *gradients;
    keep_weights(model, nullptr, pipeline.named_parameters(), result);
  });
  if (errors) {
    *errors = messages;
    return {};
  }
  REQUIRE(first_of(messages) == "");
  Result all = std::move(results.front());
  for (size_t rank = 1; rank < results.size(); ++rank) {
    REQUIRE((rank % static_cast<size_t>(replicas) != 0 || results[rank].losses == all.losses));
    for (size_t step = 0; step < all.gradients.size(); ++step) {
      for (const auto& [name, gradient] : results[rank].gradients[step]) {
        const auto [found, is_new] = all.gradients[step].emplace(name, gradient);
        REQUIRE((is_new || found->second.equal(gradient)));  // of replicas, the same
      }
    }
    for (const auto& [name, weight] : results[rank].weights) {
      const auto [found, is_new] = all.weights.emplace(name, weight);
      REQUIRE((is_new || found->second.equal(weight)));
    }
  }
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
