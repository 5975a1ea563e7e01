// The model that pacer-bench overlap trains, its training in a Session, and a row of its tables. Steps of
// OneBitAdam after its freeze, beside DataParallel with FusedAdamW, are in onebit_steps.cpp.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pacer/pacer.h>

#include "support/gpt.h"
#include "support/nearest_name.h"  // of examples/
#include "support/ranks.h"
#include "support/table.h"

namespace bench::overlap {

using torch::Tensor;

struct Shape {
  std::string name;
  GptShape gpt;
  int64_t batch;
};

inline Shape shape_named(const std::string& name) {
  // The layers of a GPT, without dropout; ddp_peer.py builds the same.
  const auto shape = [&](int64_t layers, int64_t width, int64_t heads, int64_t vocabulary, int64_t length,
                         int64_t batch) {
    return Shape{name, {layers, width, length, vocabulary, width / heads, "tanh", /*is_tied=*/true}, batch};
  };
  if (name == "gpt2") return shape(12, 768, 12, 50257, 1024, 16);
  if (name == "bert-large") return shape(24, 1024, 16, 30522, 512, 16);
  pacer::require(name == "tiny", "there is no model '", name, "'; ",
                 examples::suggestion(name, {"gpt2", "bert-large", "tiny"}));
  return shape(2, 64, 2, 1000, 64, 2);
}

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>, const World&)>;

inline std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<Tensor> parameters, const World&) {
  return std::make_unique<pacer::FusedAdamW>(std::move(parameters), pacer::FusedAdamWOptions(1e-5));
}

struct Training {
  Training(
      const Shape& shape, const World& world, bool together,
      const std::function<void(pacer::Session&)>& hooks = [](pacer::Session&) {},
      const MakeOptimizer& make = adamw)
      : model(shape.gpt, world->device()) {
    optimizer = make(model->parameters(), world);
    session = std::make_unique<pacer::Session>(
        *model, *optimizer, together ? world : pacer::Communicator::alone(world->device()));
    session->use(pacer::Precision::bf16());
    hooks(*session);
    std::tie(ids, targets) = draw_batch(shape.gpt, shape.batch, world->device());
  }
  void backward() {
    auto [x, y] = session->begin(ids, targets);
    session->backward(model->loss(x, y));
  }
  void step() {
    backward();
    session->step();
  }
  Gpt model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<pacer::Session> session;
  Tensor ids, targets;
};

inline void print(pacer::Communicator& world, const std::string& what, double milliseconds) {
  if (world.rank() == 0) print_row({what, format("%.3f", milliseconds)});
}

// Prints rows: momentum in one buffer and in buckets, behind backward and not, and where a step's time goes.
void time_onebit(const Shape& shape, const World& world, int64_t rounds, int64_t steps);

}  // namespace bench::overlap
