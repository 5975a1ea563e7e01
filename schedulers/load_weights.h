// Weights without a run: the parameters and buffers of a model from a checkpoint, or from any safetensors
// file, also one that Python wrote. For evaluation, for fine-tuning, for a model that was published. To go on
// with a run, use Session::resume.
//
//   pacer::load_weights(*model, "run/checkpoints");                     // the newest that verifies
//   pacer::load_weights(*model, "run/checkpoints/step-0000001000");
//   pacer::load_weights(*model, "published.safetensors", pacer::LoadWeightsOptions().allow_unexpected(true));
#pragma once

#include <string>
#include <vector>

#include <torch/arg.h>
#include <torch/nn/module.h>

namespace pacer {

struct LoadWeightsOptions {
  // True: parameters and buffers that the file does not have keep their values.
  TORCH_ARG(bool, allow_missing) = false;
  // True: tensors of the file that the model does not have are passed over.
  TORCH_ARG(bool, allow_unexpected) = false;
};

// Names, sorted: of parameters and buffers of the model that have their values from the file, of those that
// the file does not have, and of tensors of the file that the model does not have. A tensor that the model
// has under several names counts as loaded where the file has it under one of them.
struct LoadedWeights {
  std::string file;
  std::vector<std::string> loaded;
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
};

// `path`: a safetensors file, the folder of a checkpoint, whose file is compared with its checksum, or a
// folder of checkpoints; of these it takes the newest that verifies and says on stderr what it passed over.
// Values are written to the model's own tensors, on whatever device these are; optimizers and views of them
// stay valid. Shapes must agree. Floating-point values are converted to the model's dtype, as Tensor::to
// does; any other dtype must agree. Needs host memory for the tensors that are loaded. On several ranks each
// one calls it; nothing is sent.
//
// InvalidArgument for names that are missing or unexpected unless they are allowed, for other shapes and
// dtypes, for a tensor that is one in the model and two different ones in the file; FileError for a file that
// is not there, cannot be read or is damaged. Nothing was changed then.
LoadedWeights load_weights(torch::nn::Module& model, const std::string& path,
                           const LoadWeightsOptions& options = {});

}  // namespace pacer
