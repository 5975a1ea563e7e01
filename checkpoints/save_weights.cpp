#include <pacer/checkpoints/save_weights.h>

#include <cstring>
#include <map>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <pacer/checkpoints/detail/linear_names.h>
#include <pacer/checkpoints/detail/quant_state.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/core/error.h>
#include <pacer/files/detail/replaced_file.h>
#include <pacer/files/file_system.h>
#include <pacer/kernels/nf4.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer {
namespace {

at::Tensor bytes_tensor(const void* data, size_t bytes, at::ScalarType dtype) {
  const at::Tensor tensor =
      at::empty({static_cast<int64_t>(bytes / c10::elementSize(dtype))}, at::TensorOptions(dtype));
  std::memcpy(tensor.mutable_data_ptr(), data, bytes);
  return tensor;
}

// The parts of LAYER.weight, which stand in place of pacer's own buffers.
void put_parts(NamedTensors& tensors, const std::string& weight, const modules::Nf4WeightImpl& nf4) {
  const int64_t count = nf4.out_features * nf4.in_features;
  require(
      count % 2 == 0, "cannot save ", weight, " as bitsandbytes does: it has ", count,
      " elements in 4 bits, an odd number, which does not fill its bytes; leave the layer out of quantize");
  for (const auto& buffer : nf4.named_buffers()) tensors.erase(weight + "." + buffer.key());
  detail::QuantState state;
  state.dtype = nf4.dtype;
  state.shape = {nf4.out_features, nf4.in_features};
  state.nested = nf4.double_quantization;
  if (state.nested) state.offset = nf4.nested_offset.item<float>();
  const std::string text = detail::quant_state_text(state, weight);
  tensors[weight] = nf4.codes;
  tensors[weight + ".absmax"] = nf4.absmax;
  tensors[weight + ".quant_map"] = bytes_tensor(kernels::kNf4Book, sizeof kernels::kNf4Book, at::kFloat);
  tensors[weight + "." + detail::kNf4QuantState] = bytes_tensor(text.data(), text.size(), at::kByte);
  if (!state.nested) return;
  tensors[weight + ".nested_absmax"] = nf4.nested_absmax;
  tensors[weight + ".nested_quant_map"] = nf4.nested_quant_map;
}

}  // namespace

void save_weights(torch::nn::Module& model, const std::string& file) {
  require(!file.empty() && file.back() != '/', "save_weights needs the name of a file, not \"", file, "\"");
  NamedTensors tensors = detail::model_tensors(model);
  for (const auto& [name, layer] : detail::lora_names(model)) {
    const std::string prefix = name.empty() ? "" : name + ".";
    for (const modules::LoraAdapter& adapter : layer->adapters()) {
      const std::string own = prefix + "lora_" + adapter->options.name() + ".";
      for (const auto& parameter : adapter->named_parameters()) tensors.erase(own + parameter.key());
    }
  }
  for (const auto& [name, layer] : detail::linear_names(model)) {
    if (layer->nf4()) put_parts(tensors, name.empty() ? "weight" : name + ".weight", *layer->nf4());
  }
  const std::string folder = detail::folder_of_file(file);
  make_folders(posix_file_system(), folder);
  detail::write_next(file, [&](ByteSink& out) { detail::write_tensors(out, tensors, {{"format", "pt"}}); });
  detail::put_next_in_place(file);
  sync_folder(posix_file_system(), folder);
}

}  // namespace pacer
