// What the cases on edits between two steps share: leaves, their gradients, and options of a 1-bit optimizer
// that compresses alone.
#pragma once

#include <vector>

#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"

namespace pacer::testing::between_steps {

// Gradients of one rank's parameters: their places decide.
inline void set_gradients(const std::vector<Tensor>& parameters, uint64_t rank, uint64_t attempt) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() =
        onebit_gradient(at::empty(parameters[i].sizes()), rank, attempt, i).to(parameters[i].scalar_type());
  }
}

template <class Optimizer>
OptionsOf<Optimizer> alone() {
  auto options = OptionsOf<Optimizer>(0.01).freeze_step(2).compress_alone(true).weight_decay(0.1);
  options.compress_vectors(true);
  return options;
}

inline double largest_move(const Tensor& now, const Tensor& before) { return distance(now, before); }

inline std::vector<Tensor> leaves(std::vector<Tensor> tensors) {
  for (Tensor& tensor : tensors) tensor = tensor.detach().requires_grad_();
  return tensors;
}

}  // namespace pacer::testing::between_steps
