// The arms of the study: the ways of training that are compared. Each is a name, a line of help, a function
// that makes its optimizer, and the methods that its Session uses; a new arm is one entry in arms.cpp. No
// training code here.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include <pacer/modules/blocks.h>
#include <pacer/session/session.h>

#include "convergence/settings.h"

namespace convergence {

// What every arm gets: the parameters in the two groups of the GPT-2 recipe, and the recipe's numbers.
struct OptimizerRecipe {
  std::vector<torch::Tensor> decayed;    // matrices
  std::vector<torch::Tensor> undecayed;  // biases and gains
  const Settings& settings;
  torch::Tensor positions;  // learned; among the decayed
  torch::Tensor bytes;      // their embedding, which is also the head; among the decayed
  std::shared_ptr<pacer::Communicator> world;
};

enum class Method {
  curriculum,
  reshape,
  stable_decay,  // of the learning rate
  average,       // of the weights, in validation
  growing_batch,
  layer_drop,
  recompute,
  shards,
  shards_blocks,
  shards_nodes,
  pipeline,  // of all ranks
  bfloat16,
  bfloat16_wire,  // of gradients between ranks
  fused_layers,   // the model's
  fp8,
  fp8_current,
  signed_gradients,
  forgotten_errors,
  clipping_ratio,
  largest_update,
  adapters,  // low-rank, instead of the model's own weights; on a base only
  four_bits  // of the base's weights
};

struct Arm {
  std::string name;
  std::string help;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const OptimizerRecipe&)> make_optimizer;
  std::vector<Method> methods = {};
  bool only_by_name = false;  // trained where it is asked for

  bool has(Method method) const;
};

const std::vector<Arm>& arms();

// The arm of that name; throws pacer::InvalidArgument where there is none.
const Arm& find_arm(const std::string& name);

// Adds what the arm has beyond the hooks of all arms; `blocks` are the model's.
void add_methods(const Arm& arm, const Settings& settings, const pacer::Blocks& blocks, uint64_t seed,
                 pacer::Session* session);

}  // namespace convergence
