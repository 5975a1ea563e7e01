// The small language model trained as a whole by one rank, and by pipelines of threads as ranks: what the
// tests of Pipeline compare.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/hooks/detail/training_tensors.h>
#include <pacer/pacer.h>
#include <pacer/parallel/detail/pipeline_hook.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/parallel/pipeline_model.h"

namespace pacer::testing::pipelines {

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
  int64_t rows_left = 0;                                      // so many micro-batches have one more
  int64_t rows_of_batch() const { return rows * micro_batches + rows_left; }
  bool is_tied = false;
  std::function<void(LanguageModel&)> prepare = [](LanguageModel&) {};  // the whole model, before all else
  at::ScalarType dtype = at::kFloat;
  std::function<void(Session&, LanguageModel&)> use = [](Session&, LanguageModel&) {};
  std::function<void(LanguageModel&)> between = [](LanguageModel&) {
  };  // the pipeline's step and the Session's
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

inline LanguageModel make_model(const Setup& setup) {
  torch::manual_seed(4);
  LanguageModel model(setup.depth, setup.is_tied);
  setup.prepare(model);
  model->to(setup.dtype);
  return model;
}

// What one rank is and does; tests of mistakes change one of several.
struct PipelineRank {
  PipelineRank(const Setup& own, const PipelineSchedule& schedule, int stages,
               std::shared_ptr<Communicator> world, LanguageModel own_model)
      : setup(own),
        model(std::move(own_model)),
        grid(world, stages),
        pipeline(*model, model->blocks, &BlockImpl::forward, grid, schedule, setup.options),
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
    return batch_of(setup.rows_of_batch(), step, grid.replicas()->rank());
  }
  void step(int64_t number) {
    const auto [x, y] = batch(number);
    losses.push_back(pass(x, y).item<double>());
    setup.between(model);
    session->step();
  }
  double evaluate() {
    const auto [x, y] = batch_of(setup.rows_of_batch(), 99);
    return pipeline
        .evaluate(
            x, y, [this](Tensor tokens) { return model->embed(tokens); },
            [this](Tensor h, Tensor targets) { return model->loss(h, targets); })
        .item<double>();
  }
  // Of the parameters and buffers that are here.
  std::map<std::string, Tensor> weights() const {
    std::map<std::string, Tensor> all;
    const auto hook = std::dynamic_pointer_cast<detail::PipelineHook>(pipeline.hook());
    const auto& elsewhere = hook->stage_model().elsewhere();
    for (const auto& [name, tensor] : detail::model_tensors(*model)) {
      if (elsewhere.count(tensor.unsafeGetTensorImpl()) == 0) all[name] = tensor.detach().clone();
    }
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
    session.use(GradientAccumulation(GradientAccumulationOptions(setup.micro_batches)
                                         .weight_by_tokens(setup.options.weight_by_tokens())
                                         .accumulate_in_fp32(setup.options.accumulate_in_fp32())));
    session.use(GradientCopies(model, gradients));
    setup.use(session, model);
    for (int64_t step = 0; step < setup.steps; ++step) {
      const auto [x, y] = batch_of(setup.rows_of_batch(), step, rank);
      double loss = 0;
      int64_t first = 0;
      for (int64_t k = 0; k < setup.micro_batches; ++k) {
        const int64_t rows = setup.rows + (k < setup.rows_left ? 1 : 0);
        auto [tokens, targets] = session.begin(x.narrow(0, first, rows), y.narrow(0, first, rows));
        first += rows;
        const Tensor own = model->forward(tokens, targets);
        session.backward(own);
        session.step();
        loss += own.item<double>() * static_cast<double>(rows) / static_cast<double>(setup.rows_of_batch());
      }
      result.losses.push_back(loss);
    }
    const auto [x, y] = batch_of(setup.rows_of_batch(), 99);
    result.evaluated =
        session.evaluate([&, data = x, target = y] { return model->forward(data, target); }).item<double>();
    session.finish();
    result.gradients = *gradients;
    for (const auto& [name, tensor] : detail::model_tensors(*model)) {
      result.weights[name] = tensor.detach().clone();
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
inline Result run_piped(const Setup& setup, const PipelineSchedule& schedule, int stages, int replicas = 1) {
  const int count = stages * replicas;
  const auto worlds = Communicator::in_process(count, CommunicatorOptions().timeout(setup.timeout));
  std::vector<LanguageModel> models;  // one after the other, because they share a random generator
  for (int rank = 0; rank < count; ++rank) models.push_back(make_model(setup));
  std::vector<std::unique_ptr<PipelineRank>> ranks(static_cast<size_t>(count));
  std::vector<double> evaluated(static_cast<size_t>(count));
  const auto messages = run_ranks(count, [&](int r) {
    const auto at = static_cast<size_t>(r);
    ranks[at] = std::make_unique<PipelineRank>(setup, schedule, stages, worlds[at], models[at]);
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
