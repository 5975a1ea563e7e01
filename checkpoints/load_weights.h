// Weights without a run: the parameters and buffers of a model from a checkpoint, or from safetensors files,
// also those that Python wrote. For evaluation, for fine-tuning, for a model that was published. To go on
// with a run, use Session::resume.
//
//   pacer::load_weights(*model, "run/checkpoints");                     // the newest that verifies
//   pacer::load_weights(*model, "run/checkpoints/step-0000001000");
//   pacer::load_weights(*model, "published.safetensors", pacer::LoadWeightsOptions().allow_unexpected(true));
//   pacer::load_weights(*model, "hub/llama-7b-bnb-4bit");               // a folder of Hugging Face
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <torch/arg.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer {

struct LoadWeightsOptions {
  // True: parameters and buffers that the file does not have keep their values.
  TORCH_ARG(bool, allow_missing) = false;
  // True: tensors of the file that the model does not have are passed over.
  TORCH_ARG(bool, allow_unexpected) = false;
};

// Names, sorted: of parameters and buffers of the model that have their values from the file, of those that
// the file does not have, and of tensors of the file that the model does not have. A tensor that the model
// has under several names counts as loaded where the file has it under one of them. A weight that the file
// has in 4 bits as bitsandbytes writes it is one name, "LAYER.weight".
struct LoadedWeights {
  std::string file;
  std::vector<std::string> loaded;
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
};

// `path`: a safetensors file, the folder of a checkpoint, whose file is compared with its checksum, a folder
// of checkpoints; of these it takes the newest that verifies and says on stderr what it passed over; or a
// folder with model.safetensors, or with model.safetensors.index.json and the files that it names.
// Values are written to the model's own tensors, on whatever device these are; optimizers and views of them
// stay valid. Shapes must agree. Floating-point values are converted to the model's dtype, as Tensor::to
// does; any other dtype must agree. Needs host memory for the tensors that are loaded. On several ranks each
// one calls it; nothing is sent.
//
// A weight in 4 bits as bitsandbytes writes it (NF4, blocks of 64, with or without double quantisation) takes
// the place of the weight of a pacer::modules::Linear of that size, whatever its storage was, as
// pacer::modules::quantize would have put it there: load before the optimizer is made. A layer that is in 4
// bits in the model takes no other weight: load, then quantize.
//
// InvalidArgument for names that are missing or unexpected unless they are allowed, for other shapes and
// dtypes, for a tensor that is one in the model and two different ones in the file, for other kinds of 4 bits
// and for layers that cannot have them; FileError for a file that is not there, cannot be read, is damaged or
// not in the index. Nothing was changed then.
LoadedWeights load_weights(torch::nn::Module& model, const std::string& path,
                           const LoadWeightsOptions& options = {});

// The shapes of parameters and buffers by name in the newest checkpoint of the folder that verifies: for a model whose size
// is in its checkpoint, before it is made. Empty where the folder is not there or has no checkpoint yet, as at the start of
// a run. What was passed over is said on stderr. FileError for one that is damaged or cannot be read.
std::map<std::string, std::vector<int64_t>> saved_shapes(const std::string& folder);

}  // namespace pacer
