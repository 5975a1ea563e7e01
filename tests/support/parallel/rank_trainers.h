// A small model trained by ranks as threads, each of which can be set up differently.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "support/collectives/ranks.h"
#include "support/session/small_run.h"

namespace pacer::testing {

// One rank's model and training, as a table of what can be different.
struct RankSetup {
  std::vector<int64_t> widths = {4, 6, 3};
  bool bias = true;
  at::ScalarType dtype = at::kFloat;
  bool reversed = false;  // order of the parameters in the optimizer
  bool two_groups = false;
  bool frozen = false;  // the first layer
  FusedAdamWOptions options = FusedAdamWOptions(0.01);
  std::function<void(Session&)> hooks = [](Session&) {};
  DataParallelOptions data_parallel;
  std::function<void(Session&)> reduction;  // instead of DataParallel
  std::function<void(torch::nn::Sequential&)> change_model = [](torch::nn::Sequential&) {};
  int64_t first_step = 0;
};

struct RankTrainer {
  RankTrainer(const RankSetup& setup, std::shared_ptr<Communicator> world) {
    torch::manual_seed(3);
    for (size_t i = 0; i + 1 < setup.widths.size(); ++i) {
      model->push_back(
          torch::nn::Linear(torch::nn::LinearOptions(setup.widths[i], setup.widths[i + 1]).bias(setup.bias)));
    }
    model->to(world->device(), setup.dtype);
    setup.change_model(model);
    inputs = torch::ones({2, setup.widths.front()}, at::TensorOptions(world->device()).dtype(setup.dtype));
    if (setup.frozen) model->parameters().front().requires_grad_(false);
    std::vector<Tensor> parameters = model->parameters();
    if (setup.reversed) std::reverse(parameters.begin(), parameters.end());
    std::vector<torch::optim::OptimizerParamGroup> groups;
    if (setup.two_groups) {
      groups.emplace_back(std::vector<Tensor>{parameters.front()});
      parameters.erase(parameters.begin());
    }
    groups.emplace_back(parameters);
    optimizer = std::make_unique<FusedAdamW>(groups, setup.options);
    session = std::make_unique<Session>(*model, *optimizer, world);
    session->use(PartsProbe(parts));
    setup.reduction ? setup.reduction(*session) : void(session->use(DataParallel(setup.data_parallel)));
    setup.hooks(*session);
    parts->progress.step = setup.first_step;
  }

  void begin_and_backward() {
    auto [x] = session->begin(inputs);
    session->backward(model->forward(x).square().mean());
  }
  void step() {
    do {
      begin_and_backward();
    } while (!session->step());
  }
  std::vector<Tensor> snapshot() const {
    std::vector<Tensor> values;
    for (const Tensor& parameter : model->parameters()) values.push_back(parameter.detach().clone());
    return values;
  }

  torch::nn::Sequential model;
  Tensor inputs;
  std::unique_ptr<FusedAdamW> optimizer;
  std::unique_ptr<Session> session;
  SessionParts* parts = nullptr;
};

inline std::vector<std::unique_ptr<RankTrainer>> trainers_of(const std::vector<RankSetup>& setups,
                                                             const CommunicatorOptions& options = {}) {
  std::vector<std::unique_ptr<RankTrainer>> trainers;
  const auto worlds = Communicator::in_process(static_cast<int>(setups.size()), options);
  for (size_t i = 0; i < setups.size(); ++i) {
    trainers.push_back(std::make_unique<RankTrainer>(setups[i], worlds[i]));
  }
  return trainers;
}

// The messages of `trainers`, each running f in its thread.
inline std::vector<std::string> run_all(std::vector<std::unique_ptr<RankTrainer>>& trainers,
                                        const std::function<void(RankTrainer&, int)>& f) {
  return run_ranks(static_cast<int>(trainers.size()),
                   [&](int rank) { f(*trainers[static_cast<size_t>(rank)], rank); });
}

}  // namespace pacer::testing
