#include <pacer/checkpoints/load_weights.h>

#include <utility>

#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/checkpoints/detail/merged_weights.h>
#include <pacer/checkpoints/detail/named_weights.h>
#include <pacer/checkpoints/detail/quantized_weights.h>
#include <pacer/checkpoints/detail/weights_files.h>
#include <pacer/files/file_system.h>
#include <pacer/files/safetensors.h>
#include <pacer/hooks/detail/training_tensors.h>

namespace pacer {

LoadedWeights load_weights(torch::nn::Module& model, const std::string& path,
                           const LoadWeightsOptions& options) {
  const detail::WeightsFiles files = detail::find_weights(path);
  detail::require_unmerged(model, "cannot load weights from " + files.where + ": ");
  const std::vector<SafetensorsFile> headers = detail::read_headers(files);
  const std::map<std::string, TensorView> in_files = detail::tensors_of(headers);
  detail::QuantizedWeights quantized(model, in_files);
  return detail::load_named(detail::model_tensors(model), files, in_files, quantized, options);
}

std::map<std::string, std::vector<int64_t>> saved_shapes(const std::string& folder) {
  std::map<std::string, std::vector<int64_t>> shapes;
  if (!folder_exists(posix_file_system(), folder)) return shapes;
  const std::string newest = detail::find_newest(folder);
  if (newest.empty()) return shapes;
  const std::vector<SafetensorsFile> headers = detail::read_headers(detail::find_weights(newest));
  for (const auto& [name, tensor] : detail::tensors_of(headers)) shapes.emplace(name, tensor.shape);
  return shapes;
}

}  // namespace pacer
