// How ranks keep the same what changes beside the optimizer's step: buffers, and parameters that forward
// passes write to.
#include <pacer/parallel/parallel_training.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/modules/detail/buffer_names.h>

namespace pacer {

void ParallelTraining::remember_parameters() {
  const std::vector<Parameter> before = std::exchange(parameters_, {});
  std::unordered_set<const void*> seen;
  std::vector<at::Tensor> all = parts_->model().parameters();
  for (const at::Tensor& tensor : detail::all_optimizer_parameters(*parts_)) all.push_back(tensor);
  for (const at::Tensor& tensor : all) {
    const void* const key = tensor.unsafeGetTensorImpl();
    if (parts_->tensors_on_other_ranks.count(key) != 0 || !seen.insert(key).second) continue;
    const auto old = std::find_if(before.begin(), before.end(),
                                  [&](const Parameter& other) { return other.tensor.is_same(tensor); });
    parameters_.push_back(old == before.end() ? Parameter{tensor, 0, false, false, {}} : *old);
    parameters_.back().strides = tensor.strides().vec();
  }
}

void ParallelTraining::forward_begin(const Progress& /*progress*/) {
  // An evaluation that puts other weights or buffers in for a while takes them out again.
  const bool trains = parts_->evaluations == 0;
  in_forward_ = is_joined() && has_whole_parameters() && trains;
  if (in_forward_) {
    for (Parameter& parameter : parameters_) parameter.version = parameter.tensor._version();
  }
  if (parts_->evaluations == 1) {
    in_evaluation_ = true;
    for (Buffer& buffer : buffers_) buffer.version_before_evaluation = buffer.tensor._version();
  }
  // Before the first pass of training, and behind a load and the broadcast of initial values.
  if (!buffers_.empty() || !syncs_buffers_ || !trains) return;
  for (const auto& module : parts_->model().modules(/*include_self=*/false)) remember_buffers(module);
  // The model itself may not be held by a shared_ptr; it outlives this hook.
  remember_buffers(std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &parts_->model()));
}

void ParallelTraining::forward_end() {
  if (parts_->evaluations == 1 && std::exchange(in_evaluation_, false)) {
    for (Buffer& buffer : buffers_) {
      buffer.version += buffer.tensor._version() - buffer.version_before_evaluation;
    }
  }
  if (!std::exchange(in_forward_, false)) return;
  for (Parameter& parameter : parameters_) {
    parameter.is_written = parameter.is_written || parameter.tensor._version() != parameter.version;
  }
}

void ParallelTraining::remember_buffers(const std::shared_ptr<torch::nn::Module>& owner) {
  for (const auto& item : owner->named_buffers(/*recurse=*/false)) {
    if (!item.value().defined() ||
        parts_->tensors_on_other_ranks.count(item.value().unsafeGetTensorImpl()) != 0)
      continue;
    const bool is_statistic = detail::is_running_statistic(item.key());
    buffers_.push_back({item.value(), owner, is_statistic, item.value()._version()});
  }
}

// By position: '1' where training is known to change the buffer, or changes it here.
std::string ParallelTraining::changed_buffers() const {
  std::string changed = is_changing_;
  changed.resize(buffers_.size(), '0');
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& buffer = buffers_[i];
    const bool is_written = buffer.is_statistic && buffer.owner->is_training();
    if (is_written || buffer.tensor._version() != buffer.version) changed[i] = '1';
  }
  return changed;
}

// By position, '1' where forward passes of this or another rank write to the parameter.
std::string ParallelTraining::written_parameters() const {
  std::string written;
  for (const Parameter& parameter : parameters_) {
    written += parameter.is_written || parameter.is_shared ? '1' : '0';
  }
  return written;
}

bool ParallelTraining::sees_changes() const {
  return (syncs_buffers_ && changed_buffers() != is_changing_) ||
         std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& parameter) {
           return (parameter.is_written && !parameter.is_shared) ||
                  parameter.tensor.strides() != at::IntArrayRef(parameter.strides);
         });
}

// What has changed on any rank is rank 0's on all of them from then on. That there is something new, all have
// heard with the status of the step.
void ParallelTraining::share_written_parameters() {
  Communicator& world = parts_->data_ranks();
  if (std::exchange(learns_changes_, false)) {
    // Gradients of other memory orders than the other ranks' were added to the wrong elements of theirs.
    require_agreement(world, parts_->progress.step, detail::parameter_facts(*parts_));
    if (!detail::same_tensors(trained_, detail::trained_parameters(*parts_))) share_parameters();
    for (Parameter& parameter : parameters_) parameter.strides = parameter.tensor.strides().vec();
    if (syncs_buffers_) is_changing_ = changed_buffers();
    std::string changes = written_parameters() + is_changing_;
    for (const std::string& of_rank : world.exchange(changes)) {
      require(of_rank.size() == changes.size(), "the model has ", is_changing_.size(),
              " buffers on this rank, but another number on another; register the same on all of them");
      for (size_t i = 0; i < of_rank.size(); ++i) changes[i] = std::max(changes[i], of_rank[i]);
    }
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].is_shared = changes[i] == '1';
    is_changing_ = changes.substr(parameters_.size());
  }
  std::vector<at::Tensor> shared;
  for (const Parameter& parameter : parameters_) {
    if (parameter.is_shared) shared.push_back(parameter.tensor);
  }
  const at::NoGradGuard no_grad;
  detail::broadcast_all(world, shared);
  // Rank 0, too, has been written to, so that optimizers which keep copies of more digits take it up alike.
  for (const at::Tensor& tensor : shared) tensor.unsafeGetTensorImpl()->bump_version();
}

void ParallelTraining::sync_buffers() {
  std::vector<at::Tensor> changing;
  for (size_t i = 0; i < is_changing_.size(); ++i) {
    if (is_changing_[i] == '1') changing.push_back(buffers_[i].tensor);
  }
  const at::NoGradGuard no_grad;
  detail::broadcast_all(parts_->data_ranks(), changing);
}

}  // namespace pacer
