// The tensors that a run consists of, by name: those of the model, all that goes into a checkpoint, and which
// rank writes which.
#pragma once

#include <map>
#include <string>

#include <pacer/optimizers/named_tensors.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer::detail {

// Parameters and buffers by name, in the model's memory.
NamedTensors model_tensors(const torch::nn::Module& model);

// Throws InvalidArgument that names the first tensor that values cannot be copied into: one that was
// expanded, or was made under InferenceMode.
void check_writable(const NamedTensors& tensors);

// Everything that a run needs to go on.
struct TrainingState {
  // Parameters and buffers by name; they share the model's memory when exported, and merged weights are what
  // unmerge() restores.
  NamedTensors model;
  NamedTensors optimizer;  // see SessionOptimizer::export_state
  // SessionOptimizer::export_rank_state: others on each rank, where all the rest is the same but for
  // `session`.
  NamedTensors rank_optimizer;
  NamedTensors session;  // "progress/...", "random/...", "adapters", "guard/...", "hook/NAME/..."
};

// Which rank writes which tensor.
struct WriterOfTensor {
  std::map<std::string, int> model, optimizer;
  bool model_is_dealt_out = false;
};

}  // namespace pacer::detail
