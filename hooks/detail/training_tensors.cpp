#include <pacer/hooks/detail/training_tensors.h>

#include <ATen/MemoryOverlap.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <pacer/core/error.h>

namespace pacer::detail {

NamedTensors model_tensors(const torch::nn::Module& model) {
  NamedTensors tensors;
  for (const auto& item : model.named_parameters()) tensors.emplace(item.key(), item.value());
  for (const auto& item : model.named_buffers()) {
    if (item.value().defined()) tensors.emplace(item.key(), item.value());
  }
  return tensors;
}

void check_writable(const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    require(tensor.layout() != at::kStrided || at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
            "tensor ", name, " of the model, of shape ", tensor.sizes(),
            ", was expanded: several of its elements share memory, so that no values can be loaded into it; "
            "give the model its contiguous()");
    require(!tensor.is_inference() || c10::InferenceMode::is_enabled(), "tensor ", name,
            " of the model was made under InferenceMode, so that no values can be loaded into it; make it "
            "outside");
  }
}

}  // namespace pacer::detail
