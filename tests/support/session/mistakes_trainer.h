// A small training loop that mistakes are made in: a model of one layer, its optimizer and a Session.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/linear.h>

#include <pacer/pacer.h>

#include "support/optimizers/optimizers.h"
#include "support/session/mistakes.h"

namespace pacer::testing {

// A model of one layer, its optimizer, and a loop in parts.
struct Trainer {
  explicit Trainer(double rate = 0.1)
      : optimizer(model->parameters(), FusedAdamWOptions(rate)), session(model, optimizer) {}

  Tensor forward() {
    auto [x] = session.begin(inputs);
    return model->forward(x).square().mean();
  }
  void micro_step() {
    session.backward(forward());
    session.step();
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) micro_step();
  }

  torch::nn::Linear model{3, 2};
  FusedAdamW optimizer;
  Session session;
  Tensor inputs = torch::ones({4, 3});
};

inline Mistake with_trainer(std::string name, std::vector<std::string> says,
                            std::function<void(Trainer&)> make) {
  return {std::move(name), std::move(says), [make = std::move(make)] {
            Trainer trainer;
            make(trainer);
            trainer.session.finish();
          }};
}

}  // namespace pacer::testing
