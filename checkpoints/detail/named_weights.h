// Values of safetensors files written to tensors by name: what load_weights does for the tensors of a model, and
// load_causal_lm for parts of them under other names.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <pacer/checkpoints/detail/quantized_weights.h>
#include <pacer/checkpoints/detail/weights_files.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/files/safetensors.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// Returns all tensors of the files by name; the first where several files have one. The views point into `headers`.
std::map<std::string, TensorView> tensors_of(const std::vector<SafetensorsFile>& headers);

// Returns what keeps the tensor of a file from the one of this name; empty where it fits, as it is or converted.
std::string misfit_in_file(const std::string& name, const at::Tensor& own, const TensorView& there);

// Writes the values of `files`, whose tensors are `in_files`, to `tensors`, which may be views of a model's; what
// `quantized` takes is its own. Returns and throws what load_weights does; nothing was changed then.
LoadedWeights load_named(NamedTensors tensors, const WeightsFiles& files,
                         const std::map<std::string, TensorView>& in_files, QuantizedWeights& quantized,
                         const LoadWeightsOptions& options);

}  // namespace pacer::detail
