// The arms of the study: the ways of training that are compared. Each is a name, a line of help and a
// function that makes its optimizer; a new arm is one entry in arms.cpp. No training code here.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

namespace convergence {

// What every arm gets: the parameters in the two groups of the GPT-2 recipe, and the recipe's numbers.
struct OptimizerRecipe {
  std::vector<torch::Tensor> decayed;    // matrices
  std::vector<torch::Tensor> undecayed;  // biases and gains
  double learning_rate;
  double weight_decay;
};

struct Arm {
  std::string name;
  std::string help;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const OptimizerRecipe&)> make_optimizer;
};

const std::vector<Arm>& arms();

// The arm of that name; throws pacer::InvalidArgument where there is none.
const Arm& find_arm(const std::string& name);

}  // namespace convergence
