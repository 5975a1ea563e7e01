// Runs of several ranks whose blocks have no memory at first, and of ranks that have the same model whole.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <pacer/modules/deferred.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/parallel/data_parallel.h>
#include <pacer/parallel/shards.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/modules/odd_blocks.h"

namespace pacer::testing::deferred {

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(torch::nn::Module&)>;

inline void draw_all(torch::nn::Module& block) {
  for (Tensor& parameter : block.parameters()) parameter.normal_(0, 0.3);
}
inline MaterializeBlock drawn() { return seeded_blocks(42, draw_all); }

inline MakeOptimizer adamw(const FusedAdamWOptions& options = FusedAdamWOptions(0.01)) {
  return [options](torch::nn::Module& model) {
    return std::make_unique<FusedAdamW>(parameters_of(model), options);
  };
}

struct Plan {
  OddOptions odd;
  MakeOptimizer optimizer = adamw();
  at::ScalarType dtype = at::kFloat;
  int world_size = 2;
  int64_t steps = 3;
  bool is_deferred = true;
  MaterializeBlock on_others = nullptr;    // in place of the next on all ranks but the first
  MaterializeBlock materialize = drawn();  // of the deferred one; empty: none
  InitialParameters initial = InitialParameters::broadcast;
  std::function<void(Session&)> use = [](Session&) {};
  std::function<void(Session&, OddModel&)> before_steps = [](Session&, OddModel&) {};
};

inline OddModel model_of(const Plan& plan) {
  torch::manual_seed(5);
  OddModel model(plan.odd);
  if (plan.dtype != at::kFloat) model->to(plan.dtype);
  for (size_t i = 0; i < model->blocks->size(); ++i) {
    const auto block = model->blocks->ptr(i);
    if (plan.is_deferred) {
      defer_initialization(*block);
    } else {
      const at::NoGradGuard no_grad;
      drawn()({*block, i, "blocks." + std::to_string(i)});
    }
  }
  return model;
}

inline std::string run(const Plan& plan, std::vector<std::vector<Tensor>>* values = nullptr) {
  const auto worlds =
      Communicator::in_process(plan.world_size, CommunicatorOptions().timeout(std::chrono::seconds(30)));
  std::vector<OddModel> models;
  for (int rank = 0; rank < plan.world_size; ++rank) models.push_back(model_of(plan));
  if (values != nullptr) values->assign(models.size(), {});
  return first_of(run_ranks(plan.world_size, [&](int rank) {
    OddModel& model = models[static_cast<size_t>(rank)];
    const auto optimizer = plan.optimizer(*model);
    Session session(*model, *optimizer, worlds[static_cast<size_t>(rank)]);
    if (plan.is_deferred) {
      ShardsOptions options;
      if (plan.materialize) options.materialize(plan.materialize);
      if (plan.on_others && rank > 0) options.materialize(plan.on_others);
      session.use(Shards(model->blocks, options.initial_parameters(plan.initial)));
    } else {
      session.use(DataParallel());
    }
    plan.use(session);
    plan.before_steps(session, model);
    while (session.progress().step < plan.steps) {
      const auto step = session.progress().step;
      const Tensor in = torch::arange(20, torch::kFloat).view({4, 5}) / 20 + rank + step;
      auto [x] = session.begin(in.to(plan.dtype));
      session.backward(model->forward(x).square().mean());
      session.step();
    }
    session.finish();
    if (values == nullptr) return;
    const auto whole = session.whole_parameters();
    for (const Tensor& parameter : model->parameters()) {
      (*values)[static_cast<size_t>(rank)].push_back(parameter.detach().clone());
    }
  }));
}

inline std::vector<std::vector<Tensor>> trained(const Plan& plan) {
  std::vector<std::vector<Tensor>> values;
  REQUIRE(run(plan, &values) == "");
  return values;
}

// On every rank, to the bit.
inline void require_same(const std::vector<std::vector<Tensor>>& found,
                         const std::vector<std::vector<Tensor>>& wanted) {
  for (const auto& of_rank : found) {
    REQUIRE(of_rank.size() == wanted.front().size());
    for (size_t i = 0; i < of_rank.size(); ++i) REQUIRE(of_rank[i].equal(wanted.front()[i]));
  }
}

}  // namespace pacer::testing::deferred
