// What ranks do together in each step: they say where they are, gradients come together, and what else has changed
// becomes the same. How they begin is in parallel_training_start.cpp.
#include <pacer/parallel/parallel_training.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>
#include <pacer/hooks/step_report.h>
#include <pacer/modules/detail/buffer_names.h>

namespace pacer {

void ParallelTraining::forward_begin(const Progress& progress) {
  // An evaluation that puts other weights or buffers in for a while takes them out again.
  const bool trains = parts_->evaluations == 0;
  // Backward needs what forward has read, and no values of rank 0's that come between the two.
  if (is_joined_ && trains && has_new_parameters()) follow_parameters(progress);
  const bool have_values = parts_->sharded_state == nullptr || !parts_->sharded_state->keeps_parts();
  in_forward_ = is_joined_ && have_values && trains;
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

void ParallelTraining::remember_buffers(const std::shared_ptr<torch::nn::Module>& owner) {
  for (const auto& item : owner->named_buffers(/*recurse=*/false)) {
    if (!item.value().defined() ||
        parts_->tensors_on_other_ranks.count(item.value().unsafeGetTensorImpl()) != 0)
      continue;
    const bool is_statistic = detail::is_running_statistic(item.key());
    buffers_.push_back({item.value(), owner, is_statistic, item.value()._version()});
  }
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

void GradientExchange::backward_begin(const Progress& progress) {
  if (parts().world().world_size() == 1) return;
  const bool is_last = progress.micro_step + 1 == progress.micro_steps;
  follow_parameters(progress);
  if (is_last || sends_in_every_pass()) announce(progress, is_last ? Intent::step : Intent::micro_step);
  begin_pass(progress, is_last);
}

bool ParallelTraining::has_new_parameters() const {
  if (detail::are_trained(trained_, parts_->optimizer().param_groups())) return false;
  const std::vector<at::Tensor> trained = detail::trained_parameters(*parts_);
  return std::any_of(trained.begin(), trained.end(), [this](const at::Tensor& tensor) {
    return shared_.count(tensor.unsafeGetTensorImpl()) == 0;
  });
}

void ParallelTraining::follow_parameters(const Progress& progress) {
  parts_->world().set_step(progress.step);
  if (!detail::are_trained(trained_, parts_->optimizer().param_groups())) {
    join_ranks(progress);  // parameters were frozen, unfrozen or added: on every rank, or they disagree here
  }
}

void ParallelTraining::announce(const Progress& progress, Intent intent) {
  statuses_ = StatusExchange(parts_->world(), status_of(intent, progress));
  knows_totals_ = false;
}

RankStatus ParallelTraining::status_of(Intent intent, const Progress& progress) const {
  RankStatus status;
  status.intent = intent;
  status.step = progress.step;
  status.micro_steps = progress.micro_steps;
  if (counts_batches()) {
    status.weight = parts_->window.weight;
    status.tokens = parts_->window.tokens;
  }
  detail::checksum_of_numbers(parts_->optimizer()).copy(status.fingerprint, sizeof(status.fingerprint));
  status.stop = parts_->asks_to_stop && parts_->asks_to_stop() ? 1 : 0;
  status.has_changes = sees_changes() ? 1 : 0;
  return status;
}

bool ParallelTraining::sees_changes() const {
  return (syncs_buffers_ && changed_buffers() != is_changing_) ||
         std::any_of(parameters_.begin(), parameters_.end(), [](const Parameter& parameter) {
           return (parameter.is_written && !parameter.is_shared) ||
                  parameter.tensor.strides() != at::IntArrayRef(parameter.strides);
         });
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

void ParallelTraining::learn_totals() {
  if (!statuses_.is_under_way()) return;
  await_totals();
  knows_totals_ = true;
}

void ParallelTraining::await_totals() { add_totals(statuses_.wait()); }

// Replicas that take different steps are no replicas any more.
void ParallelTraining::add_totals(const std::vector<RankStatus>& ranks) {
  for (const RankStatus& rank : ranks) {
    if (std::memcmp(rank.fingerprint, ranks[0].fingerprint, sizeof(rank.fingerprint)) == 0) continue;
    require_agreement(parts_->world(), ranks[0].step, detail::optimizer_facts(parts_->optimizer()));
  }
  WindowTotals& window = parts_->window;
  window.weight = 0;
  window.tokens = 0;
  for (const RankStatus& rank : ranks) {
    window.weight += rank.weight;
    window.tokens += rank.tokens;
    parts_->should_stop = parts_->should_stop || rank.stop != 0;
    learns_changes_ = learns_changes_ || rank.has_changes != 0;
  }
  window.gradient_scale = scale_;
}

void GradientExchange::backward_end(const Progress& progress) {
  if (!is_joined()) return;
  const bool is_last = progress.micro_step + 1 == progress.micro_steps;
  end_pass(is_last);
  if (!is_last) await_peers();
}

void ParallelTraining::await_peers() {
  if (statuses_.is_under_way()) std::exchange(statuses_, {}).wait();
}

void GradientExchange::backward_failed() {
  if (is_joined()) drop();
  ParallelTraining::backward_failed();
}

// Where the ranks are at different places, that is why an operation failed; this says where they are.
void ParallelTraining::backward_failed() {
  if (statuses_.is_under_way() && statuses_.is_done()) await_peers();
}

// A window that ends early did not begin to travel.
void GradientExchange::gradients_ready(const Progress& window) {
  if (!is_joined()) return;
  const bool ends_early = settle_totals(window);
  settle_missed(window);
  if (ends_early) reduce(window);
  Work loss = add_losses();
  wait();
  share_written_parameters();
  loss.wait();
}

bool ParallelTraining::settle_totals(const Progress& window) {
  const bool ends_early = !knows_totals_ && !statuses_.is_under_way();
  if (ends_early) {
    RankStatus status = status_of(Intent::last_step, window);
    // Parameters that joined since the last pass sit this step out; ranks compare and share them all the same.
    if (!detail::are_trained(trained_, parts_->optimizer().param_groups())) status.has_changes = 1;
    statuses_ = StatusExchange(parts_->world(), status);
  }
  if (!std::exchange(knows_totals_, false)) await_totals();
  return ends_early;
}

Work ParallelTraining::add_losses() {
  const at::Tensor& loss = parts_->window.loss;
  return loss.defined() ? parts_->world().all_reduce(loss, CollectiveOptions().agreed(true)) : Work();
}

// What has changed on any rank is rank 0's on all of them from then on. That there is something new, all have
// heard with the status of the step.
void ParallelTraining::share_written_parameters() {
  Communicator& world = parts_->data_ranks();
  if (std::exchange(learns_changes_, false)) {
    // Gradients of other memory orders than the other ranks' were added to the wrong elements of theirs.
    require_agreement(world, parts_->progress.step, detail::parameter_facts(*parts_));
    if (!detail::are_trained(trained_, parts_->optimizer().param_groups())) share_parameters();
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

void ParallelTraining::after_step(StepReport& /*report*/) {
  if (is_joined() && syncs_buffers_) sync_buffers();
}

void ParallelTraining::sync_buffers() {
  std::vector<at::Tensor> changing;
  for (size_t i = 0; i < is_changing_.size(); ++i) {
    if (is_changing_[i] == '1') changing.push_back(buffers_[i].tensor);
  }
  const at::NoGradGuard no_grad;
  detail::broadcast_all(parts_->data_ranks(), changing);
}

void ParallelTraining::finish(const Progress& progress) {
  if (!is_joined()) return;
  RankStatus status;
  status.intent = Intent::finish;
  status.step = progress.step;
  StatusExchange(parts_->world(), status).wait();
}

}  // namespace pacer
