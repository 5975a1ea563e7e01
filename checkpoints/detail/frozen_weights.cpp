#include <pacer/checkpoints/detail/frozen_weights.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <unordered_set>

#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <pacer/checkpoints/detail/merged_weights.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/core/error.h>
#include <pacer/files/checksum.h>
#include <pacer/modules/detail/model_modules.h>

namespace pacer::detail {
namespace {

// By TensorImpl.
std::unordered_set<const void*> frozen_tensors(const torch::nn::Module& model) {
  std::unordered_set<const void*> frozen = nf4_buffers(model);
  for (const auto& parameter : model.parameters()) {
    if (!parameter.requires_grad()) frozen.insert(parameter.unsafeGetTensorImpl());
  }
  return frozen;
}

NamedTensors part_of_model(const torch::nn::Module& model, bool is_frozen) {
  const auto frozen = frozen_tensors(model);
  NamedTensors part;
  for (const auto& [name, tensor] : model_tensors(model)) {
    if ((frozen.count(tensor.unsafeGetTensorImpl()) != 0) == is_frozen) part.emplace(name, tensor);
  }
  return part;
}

TensorVersions versions_of(const NamedTensors& tensors) {
  TensorVersions versions;
  for (const auto& [name, tensor] : tensors) {
    versions.emplace(name, tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version()));
  }
  return versions;
}

}  // namespace

NamedTensors saved_model(const SessionParts& parts) {
  if (!parts.saves_frozen) return part_of_model(parts.model(), false);
  NamedTensors tensors = model_tensors(parts.model());
  for (auto item = tensors.begin(); item != tensors.end();) {
    const bool is_here = parts.tensors_on_other_ranks.count(item->second.unsafeGetTensorImpl()) == 0;
    item = is_here ? std::next(item) : tensors.erase(item);
  }
  return tensors;
}

at::Tensor frozen_checksum(const SessionParts& parts) {
  Checksum sum;
  for (const auto& [name, tensor] : without_merged(parts.model(), part_of_model(parts.model(), true))) {
    const std::string line = concatenate(name, ' ', tensor.scalar_type(), ' ', tensor.sizes(), '\n');
    sum.add(line.data(), line.size());
    const at::Tensor values = tensor.detach().resolve_conj().cpu().contiguous();
    sum.add(values.const_data_ptr(), values.nbytes());
  }
  const std::string hex = sum.hex();
  at::Tensor bytes = at::empty({static_cast<int64_t>(hex.size())}, at::kByte);
  std::copy(hex.begin(), hex.end(), bytes.mutable_data_ptr<uint8_t>());
  return bytes;
}

TensorVersions frozen_versions(const SessionParts& parts) {
  return versions_of(part_of_model(parts.model(), true));
}

TensorVersions model_versions(const SessionParts& parts) { return versions_of(model_tensors(parts.model())); }

}  // namespace pacer::detail
