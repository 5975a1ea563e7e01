#include <pacer/checkpoints/mean_weights.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/core/error.h>
#include <pacer/files/file_system.h>
#include <pacer/hooks/detail/training_tensors.h>

namespace pacer {
namespace {

struct Mean {
  at::Tensor parameter, mean;

  void add(double share) {
    const at::Tensor values = parameter.detach();
    const bool is_narrow = values.element_size() < 4;
    if (!mean.defined()) {
      mean = is_narrow ? values.to(at::kFloat) : values.clone();
    } else {
      mean.add_(values.to(mean.scalar_type()) - mean, share);
    }
  }
};

}  // namespace

std::vector<int64_t> load_mean_weights(torch::nn::Module& model, const std::string& folder, int64_t count) {
  require(count >= 1, "load_mean_weights takes the mean of at least 1 checkpoint, not of ", count);
  require<FileError>(folder_exists(posix_file_system(), folder), "there is no folder ", folder);
  auto found = detail::verified_checkpoints(folder, static_cast<size_t>(count));
  require(found.size() >= static_cast<size_t>(count), folder, " has ", found.size(),
          " checkpoints that verify, and load_mean_weights was to take the mean of ", count,
          "; let CheckpointsOptions::keep keep as many, or ask for fewer");
  found.resize(static_cast<size_t>(count));
  std::reverse(found.begin(), found.end());

  const at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> before;
  for (const auto& [name, tensor] : detail::model_tensors(model)) before.emplace_back(tensor, tensor.clone());
  std::vector<Mean> means;
  for (const at::Tensor& parameter : model.parameters()) means.push_back({parameter, {}});
  std::vector<int64_t> steps;
  try {
    for (const auto& [checkpoint, manifest] : found) {
      load_weights(model, checkpoint.folder);
      steps.push_back(checkpoint.step);
      for (Mean& mean : means) mean.add(1 / static_cast<double>(steps.size()));
    }
  } catch (...) {
    for (auto& [tensor, value] : before) tensor.copy_(value);
    throw;
  }
  for (Mean& mean : means) mean.parameter.copy_(mean.mean);
  return steps;
}

}  // namespace pacer
