// How ranks come to train one model: they compare what they are, and start with the same values.
#include <pacer/parallel/parallel_training.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/version.h>

#include <pacer/collectives/detail/tensor_text.h>
#include <pacer/core/error.h>
#include <pacer/core/version.h>
#include <pacer/files/checksum.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/detail/training_tensors.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/modules/deferred.h>
#include <pacer/modules/detail/model_modules.h>

namespace pacer {

void ParallelTraining::attach(SessionParts& parts) {
  require(parts.world_was_given, "the hook ", hook_name(),
          " needs to know its peers; give the Session a Communicator: Session(model, optimizer, "
          "Communicator::from_environment())");
  require(parts.world().device() == parts.device(), "the model is on ", parts.device().str(), ", but ",
          parts.world().backend_name(), " joins the ranks on ", parts.world().device().str(),
          "; call model->to(world->device()) before the optimizer is made");
  parts_ = &parts;
  parts.unused_is_zero = unused_is_zero();
}

void ParallelTraining::start(const Progress& progress) {
  parts_->learn_totals = [this] { learn_totals(); };
  shared_.clear();
  if (parts_->world().world_size() == 1) return;
  detail::check_writable(detail::model_tensors(parts_->model()));
  join_ranks(progress);
}

std::vector<Fact> ParallelTraining::facts() const {
  std::vector<Fact> facts = {
      {"library", detail::concatenate("pacer ", version(), ", LibTorch ", TORCH_VERSION)},
      {"communicator", detail::concatenate(parts_->world().backend_name(), ", ordered sums ",
                                           parts_->world().options().ordered_sum() ? "on" : "off")},
      {"replicas",
       detail::concatenate("buffers ", syncs_buffers_ ? "follow rank 0" : "are each rank's own",
                           ", initial parameters ",
                           initial_ == InitialParameters::check ? "are compared" : "are rank 0's")},
      {"micro-steps",
       detail::concatenate(parts_->micro_steps, parts_->weight_by_tokens ? " weighted by tokens" : "")},
  };
  if (parts_->replicas) {  // whose parameters are not those of all ranks
    for (const auto& [name, tensor] : detail::model_tensors(parts_->model())) {
      facts.push_back({"tensor of the model", name + ", " + detail::tensor_text(tensor)});
    }
  }
  std::string hooks;
  for (const auto& hook : parts_->hooks()) hooks += (hooks.empty() ? "" : ", ") + hook->hook_name();
  facts.push_back({"hooks", hooks});
  for (const auto& hook : parts_->hooks()) facts.push_back({"hook " + hook->hook_name(), hook->agreement()});
  for (Fact& fact : detail::optimizer_facts(parts_->optimizer())) facts.push_back(std::move(fact));
  return facts;
}

// Of ranks that have the same parameters.
std::vector<Fact> ParallelTraining::replica_facts() const {
  std::vector<Fact> facts = detail::parameter_facts(*parts_);
  const bool shares_buffers = syncs_buffers_ || initial_ == InitialParameters::broadcast;
  for (Fact& fact : detail::other_facts(*parts_, shares_buffers)) facts.push_back(std::move(fact));
  return facts;
}

void ParallelTraining::join_ranks(const Progress& progress) {
  parts_->world().set_step(progress.step);
  std::vector<Fact> all = facts();
  if (!parts_->replicas) {
    for (Fact& fact : replica_facts()) all.push_back(std::move(fact));
  }
  require_agreement(parts_->world(), progress.step, all);
  if (parts_->replicas) require_agreement(*parts_->replicas, progress.step, replica_facts());
  share_parameters();
  is_joined_ = false;
  scale_ = join();
  is_joined_ = true;
  trained_ = detail::trained_parameters(*parts_);
  remember_parameters();
}

void ParallelTraining::share_parameters() {
  const at::NoGradGuard no_grad;
  Communicator& world = parts_->data_ranks();
  const auto is_here = [this](const at::Tensor& tensor) {
    return parts_->tensors_on_other_ranks.count(tensor.unsafeGetTensorImpl()) == 0;
  };
  if (initial_ == InitialParameters::check) {
    std::vector<Fact> values;
    const auto add = [&](const std::string& what, const at::Tensor& tensor) {
      // What was compared before is no initial value any more, and forward passes may have written to it.
      if (!shared_.emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr()).second) return;
      if (is_deferred(tensor)) return;  // Shards compares it once it has values
      const at::Tensor host = tensor.detach().cpu().contiguous();
      values.push_back({"initial value of " + what,
                        "checksum " + Checksum().add(host.const_data_ptr(), host.nbytes()).hex()});
    };
    for (const auto& item : parts_->model().named_parameters()) {
      if (is_here(item.value())) add("parameter " + item.key(), item.value());
    }
    const auto codes = detail::nf4_buffers(parts_->model());
    for (const auto& item : parts_->model().named_buffers()) {
      if (!item.value().defined() || !is_here(item.value())) continue;
      const bool is_weight = codes.count(item.value().unsafeGetTensorImpl()) != 0;
      if (is_weight || syncs_buffers_)
        add((is_weight ? "4-bit weight " : "buffer ") + item.key(), item.value());
    }
    require_agreement(world, parts_->progress.step, values);
    return;
  }
  std::vector<at::Tensor> tensors = parts_->model().parameters();
  for (const at::Tensor& tensor : detail::all_optimizer_parameters(*parts_)) tensors.push_back(tensor);
  for (const at::Tensor& buffer : parts_->model().buffers()) tensors.push_back(buffer);
  // What was shared before is the same on all ranks, and this step's backward may need it as it is.
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(),
                               [&](const at::Tensor& tensor) {
                                 return !is_here(tensor) || shared_.count(tensor.unsafeGetTensorImpl()) != 0;
                               }),
                tensors.end());
  for (const at::Tensor& tensor : tensors) {
    shared_.emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
  }
  // Shards shares them once they have values.
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), is_deferred), tensors.end());
  detail::broadcast_all(world, tensors);
}

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

}  // namespace pacer
