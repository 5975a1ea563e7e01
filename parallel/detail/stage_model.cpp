#include <pacer/parallel/detail/stage_model.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/refusing_storage.h>
#include <pacer/hooks/detail/training_tensors.h>

namespace pacer::detail {
namespace {

bool is_named(const std::string& tensor, const std::string& name) {
  return tensor == name || (tensor.size() > name.size() && tensor[name.size()] == '.' &&
                            tensor.compare(0, name.size(), name) == 0);
}

// For each tensor of the model, by TensorImpl, the ranks that use it.
class Users {
 public:
  Users(const torch::nn::Module& model, const Blocks& blocks, const StageCut& cut) : model_(model) {
    for (size_t s = 0; s + 1 < cut.bounds.size(); ++s) {
      const auto rank = static_cast<int>(static_cast<int64_t>(s) % cut.schedule.ranks);
      for (int64_t i = cut.bounds[s]; i < cut.bounds[s + 1]; ++i) {
        for (const auto& [name, tensor] : model_tensors(*blocks->ptr(static_cast<size_t>(i))))
          add(tensor, rank);
      }
    }
    for (const auto& item : model_tensors(model)) {
      if (ranks_of_.count(item.second.unsafeGetTensorImpl()) == 0) outside_.insert(item.first);
    }
    add_named(cut.first, 0, "first");
    add_named(cut.last, static_cast<int>(cut.schedule.ranks) - 1, "last");
    for (const std::string& name : outside_) {
      require(ranks_of_.count(tensors_.at(name).unsafeGetTensorImpl()) != 0, "\"", name,
              "\" is in no block, and Pipeline does not know which stage uses it; name it, or its module, in "
              "PipelineOptions::first, last, or both");
    }
  }
  const std::set<int>& of(const at::Tensor& tensor) const {
    return ranks_of_.at(tensor.unsafeGetTensorImpl());
  }
  const NamedTensors& tensors() const { return tensors_; }

 private:
  void add(const at::Tensor& tensor, int rank) { ranks_of_[tensor.unsafeGetTensorImpl()].insert(rank); }
  void add_named(const std::vector<std::string>& names, int rank, const char* option) {
    for (const std::string& name : names) {
      bool found = false;
      for (const auto& [of_tensor, tensor] : tensors_) {
        if (!is_named(of_tensor, name)) continue;
        found = true;
        add(tensor, rank);
      }
      // A module without tensors, such as a dropout, is on every rank.
      for (const auto& module : model_.named_modules("", /*include_self=*/false)) {
        found = found || module.key() == name;
      }
      require(found, "PipelineOptions::", option, " names \"", name,
              "\", but the model has no module, parameter or buffer of that name");
    }
  }

  const torch::nn::Module& model_;
  const NamedTensors tensors_ = model_tensors(model_);
  std::unordered_map<const void*, std::set<int>> ranks_of_;
  std::set<std::string> outside_;
};

void release(const at::Tensor& tensor, const std::string& name, int rank) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(refusing_storage(
      tensor.storage().nbytes(), tensor.device(),
      concatenate(
          "\"", name, "\" is on rank ", rank,
          " of the pipeline and has no values here; run the model through Pipeline::step or evaluate, "
          "and read weights from a checkpoint")));
}

}  // namespace

void StageCut::validate(int64_t blocks) const {
  const int64_t stages = schedule.stages();
  require(static_cast<int64_t>(bounds.size()) == stages + 1 && bounds.front() == 0 &&
              bounds.back() == blocks && std::is_sorted(bounds.begin(), bounds.end()),
          "PipelineOptions::cut must have ", stages + 1, " numbers, ascending from 0 to the ", blocks,
          " blocks of the model: stage s has the blocks cut[s] to cut[s + 1] - 1; it is {",
          at::IntArrayRef(bounds), "}");
}

std::vector<int64_t> StageCut::even(int64_t blocks, int64_t stages) {
  require(blocks >= stages, "the model has ", blocks, " blocks, fewer than the ", stages,
          " stages of the pipeline; use fewer stages, or say with PipelineOptions::cut which are empty");
  std::vector<int64_t> bounds = {0};
  for (int64_t s = 0; s < stages; ++s)
    bounds.push_back(bounds.back() + blocks / stages + (s < blocks % stages));
  return bounds;
}

StageModel::StageModel(torch::nn::Module& model, const Blocks& blocks, StageCut cut, int rank,
                       at::Device device)
    : cut_(std::move(cut)) {
  const at::NoGradGuard no_grad;
  const Users users(model, blocks, cut_);
  const auto model_parameters = model.named_parameters();
  std::map<const void*, std::string> first_name;
  for (const auto& [name, tensor] : users.tensors()) {
    const std::set<int>& ranks = users.of(tensor);
    first_name.emplace(tensor.unsafeGetTensorImpl(), name);
    if (ranks.count(rank) == 0) elsewhere_.insert(tensor.unsafeGetTensorImpl());
  }
  std::unordered_set<const void*> seen;
  for (const auto& item : model_parameters) {
    const at::Tensor& parameter = item.value();
    const std::set<int>& ranks = users.of(parameter);
    if (ranks.count(rank) == 0 || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    if (*ranks.begin() == rank) parameters_.insert(item.key(), parameter);
    if (ranks.size() > 1) tied_.push_back({item.key(), parameter, {ranks.begin(), ranks.end()}});
  }
  for (const auto& [name, tensor] : users.tensors()) {
    const void* key = tensor.unsafeGetTensorImpl();
    if (first_name.at(key) != name) continue;  // another name of the same tensor
    at::Tensor own = tensor;
    if (elsewhere_.count(key) == 0) {
      if (own.device() != device) own.set_data(own.detach().to(device));
    } else {
      if (own.requires_grad()) own.set_requires_grad(false);
      release(own, name, *users.of(tensor).begin());
    }
  }
}

}  // namespace pacer::detail
