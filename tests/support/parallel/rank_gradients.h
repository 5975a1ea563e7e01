// Ranks as threads that train a small model of blocks, each with a Session and an optimizer of any kind.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <pacer/modules/blocks.h>
#include <pacer/pacer.h>

#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::rank_gradients {

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<Optimizer(const std::vector<Tensor>&, std::shared_ptr<Communicator>)>;

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    torch::manual_seed(11);
    first = register_module("first", torch::nn::Linear(3, 4));
    for (int i = 0; i < 2; ++i) blocks->push_back(torch::nn::Linear(4, 4));
    register_module("blocks", blocks);
    last = register_module("last", torch::nn::Linear(4, 2));
  }
  Tensor loss(const Tensor& x) {
    Tensor h = torch::tanh(first->forward(x));
    for (size_t i = 0; i < blocks->size(); ++i) h = blocks->run(i, &torch::nn::LinearImpl::forward, h);
    return last->forward(h).square().mean();
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  Blocks blocks;
};
TORCH_MODULE(Model);

struct Rank {
  Rank(std::shared_ptr<Communicator> ranks, const MakeOptimizer& make,
       const std::function<void(Session&, Model&)>& use, bool leaves_out_last = false)
      : world(std::move(ranks)) {
    model->to(world->device());
    std::vector<Tensor> parameters = model->parameters();
    if (leaves_out_last) parameters.resize(parameters.size() - 2);
    optimizer = make(parameters, world);
    session = std::make_unique<Session>(*model, *optimizer, world);
    use(*session, model);
  }
  // Of global micro-batch `number`, whose loss is multiplied by `factor`.
  void backward(int64_t number, double factor = 1) {
    const Tensor data =
        torch::arange(6, at::kFloat).view({2, 3}).mul(0.1).add(0.07 * static_cast<double>(number));
    auto [x] = session->begin(data);
    session->backward(model->loss(x) * factor);
  }
  void micro_step(int64_t number) {
    backward(number);
    session->step();
  }
  Tensor parameter(size_t i) const { return model->parameters()[i]; }

  std::shared_ptr<Communicator> world;
  Model model;
  Optimizer optimizer;
  std::unique_ptr<Session> session;
};

inline const MakeOptimizer kSgd = [](const std::vector<Tensor>& parameters, const auto&) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.5));
};
inline const MakeOptimizer kAdamW = [](const std::vector<Tensor>& parameters, const auto&) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
};
inline const MakeOptimizer kFused = [](const std::vector<Tensor>& parameters, const auto&) {
  return std::make_unique<FusedAdamW>(parameters, FusedAdamWOptions(0.01));
};
inline MakeOptimizer onebit(bool overlap) {
  return [overlap](const std::vector<Tensor>& parameters, const std::shared_ptr<Communicator>& world) {
    return std::make_unique<OneBitAdam>(
        parameters, OneBitAdamOptions(0.01).freeze_step(3).overlap_backward(overlap), world);
  };
}

using Use = std::function<void(Session&, Model&)>;
inline Use data_parallel(bool in_place) {
  return
      [=](Session& session, Model&) { session.use(DataParallel(DataParallelOptions().in_place(in_place))); };
}

// The last layer, which the optimizer was made without, as a group of its own.
inline void add_last(Rank& r) {
  r.optimizer->add_param_group(torch::optim::OptimizerParamGroup(
      {r.parameter(6), r.parameter(7)}, r.optimizer->param_groups()[0].options().clone()));
}

using Ranked = std::vector<std::unique_ptr<Rank>>;
inline Ranked ranks_of(int count, const MakeOptimizer& make, const Use& use, bool leaves_out_last = false) {
  // A minute, so that ranks that wait for each other are told instead of hanging.
  const auto worlds = Communicator::in_process(count, CommunicatorOptions().timeout(std::chrono::minutes(1)));
  Ranked ranks;
  for (const auto& world : worlds) ranks.push_back(std::make_unique<Rank>(world, make, use, leaves_out_last));
  return ranks;
}

inline std::vector<std::string> messages_of(Ranked& ranks, const std::function<void(Rank&, int)>& f) {
  return run_ranks(static_cast<int>(ranks.size()),
                   [&](int rank) { f(*ranks[static_cast<size_t>(rank)], rank); });
}

inline std::string run(Ranked& ranks, const std::function<void(Rank&, int)>& f) {
  return first_of(messages_of(ranks, f));
}

// The largest difference of any parameter of their models.
inline double distance(const Rank& a, const Rank& b) {
  return testing::distance(a.model->parameters(), b.model->parameters());
}

}  // namespace pacer::testing::rank_gradients
