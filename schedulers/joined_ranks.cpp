#include <pacer/schedulers/joined_ranks.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/version.h>

#include <pacer/core/checksum.h>
#include <pacer/core/error.h>
#include <pacer/core/version.h>
#include <pacer/modules/detail/buffer_names.h>
#include <pacer/modules/detail/model_modules.h>
#include <pacer/schedulers/detail/model_facts.h>
#include <pacer/schedulers/detail/number_text.h>
#include <pacer/schedulers/detail/training_state.h>
#include <pacer/schedulers/session_parts.h>
#include <pacer/schedulers/step_report.h>

namespace pacer {
namespace {

// What JoinedRanks::facts leaves out, because schedules move it: ranks compare these in each step.
std::vector<Fact> rate_facts(const torch::optim::Optimizer& optimizer) {
  std::vector<Fact> facts;
  for (const double rate : detail::learning_rates(optimizer)) {
    facts.push_back(
        {detail::concatenate("learning rate of parameter group ", facts.size()), detail::exact_text(rate)});
  }
  return facts;
}

}  // namespace

void JoinedRanks::attach(SessionParts& parts) {
  require(parts.world_was_given, "the hook ", hook_name(),
          " needs to know its peers; give the Session a Communicator: Session(model, optimizer, "
          "Communicator::from_environment())");
  require(parts.world().device() == parts.device(), "the model is on ", parts.device().str(), ", but ",
          parts.world().backend_name(), " joins the ranks on ", parts.world().device().str(),
          "; call model->to(world->device()) before the optimizer is made");
  parts_ = &parts;
}

RankStatus JoinedRanks::status_of(Intent intent, const Progress& progress) const {
  RankStatus status;
  status.intent = intent;
  status.step = progress.step;
  status.micro_steps = progress.micro_steps;
  if (counts_batches()) {
    status.weight = parts_->window.weight;
    status.tokens = parts_->window.tokens;
  }
  const std::vector<double> rates = detail::learning_rates(parts_->optimizer());
  const std::string_view bytes(reinterpret_cast<const char*>(rates.data()), rates.size() * sizeof(double));
  checksum_of(bytes).copy(status.fingerprint, sizeof(status.fingerprint));
  status.stop = parts_->asks_to_stop && parts_->asks_to_stop() ? 1 : 0;
  status.news = sees_new_buffers() ? 1 : 0;
  return status;
}

void JoinedRanks::start(const Progress& progress) {
  shared_.clear();
  if (parts_->world().world_size() > 1) join_ranks(progress);
}

std::vector<Fact> JoinedRanks::facts() const {
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
      facts.push_back({"tensor of the model",
                       detail::concatenate(name, ", ", tensor.scalar_type(), " ", tensor.sizes())});
    }
  }
  std::string hooks;
  for (const auto& hook : parts_->hooks()) hooks += (hooks.empty() ? "" : ", ") + hook->hook_name();
  facts.push_back({"hooks", hooks});
  for (const auto& hook : parts_->hooks()) facts.push_back({"hook " + hook->hook_name(), hook->agreement()});
  for (Fact& fact : detail::optimizer_facts(*parts_)) facts.push_back(std::move(fact));
  return facts;
}

// Of ranks that have the same parameters.
std::vector<Fact> JoinedRanks::replica_facts() const {
  std::vector<Fact> facts = detail::parameter_facts(*parts_);
  for (Fact& fact : detail::frozen_facts(*parts_)) facts.push_back(std::move(fact));
  return facts;
}

void JoinedRanks::join_ranks(const Progress& progress) {
  parts_->world().set_step(progress.step);
  std::vector<Fact> all = facts();
  if (!parts_->replicas) {
    for (Fact& fact : replica_facts()) all.push_back(std::move(fact));
  }
  require_agreement(parts_->world(), progress.step, all);
  if (parts_->replicas) require_agreement(*parts_->replicas, progress.step, replica_facts());
  share_parameters();
  join();
  trained_ = detail::trained_parameters(*parts_);
}

// Before the first pass, and behind a load.
void JoinedRanks::forward_begin(const Progress& /*progress*/) {
  if (!buffers_.empty() || !syncs_buffers_) return;
  for (const auto& module : parts_->model().modules(/*include_self=*/false)) remember_buffers(module);
  // The model itself may not be held by a shared_ptr; it outlives this hook.
  remember_buffers(std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &parts_->model()));
}

void JoinedRanks::remember_buffers(const std::shared_ptr<torch::nn::Module>& owner) {
  for (const auto& item : owner->named_buffers(/*recurse=*/false)) {
    if (!item.value().defined() || parts_->elsewhere.count(item.value().unsafeGetTensorImpl()) != 0) continue;
    const bool is_statistic = detail::is_running_statistic(item.key());
    buffers_.push_back({item.value(), owner, is_statistic, item.value()._version()});
  }
}

void JoinedRanks::share_parameters() {
  const at::NoGradGuard no_grad;
  Communicator& world = parts_->data_ranks();
  const auto is_here = [this](const at::Tensor& tensor) {
    return parts_->elsewhere.count(tensor.unsafeGetTensorImpl()) == 0;
  };
  if (initial_ == InitialParameters::check) {
    std::vector<Fact> values;
    const auto add = [&](const std::string& what, const at::Tensor& tensor) {
      const at::Tensor host = tensor.detach().cpu().contiguous();
      values.push_back({"initial value of " + what,
                        "checksum " + Checksum().add(host.const_data_ptr(), host.nbytes()).hex()});
    };
    for (const auto& item : parts_->model().named_parameters()) {
      if (is_here(item.value())) add("parameter " + item.key(), item.value());
    }
    const auto codes = detail::codes_of(parts_->model());
    for (const auto& item : parts_->model().named_buffers()) {
      if (codes.count(item.value().unsafeGetTensorImpl()) != 0 && is_here(item.value())) {
        add("4-bit weight " + item.key(), item.value());
      }
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
  detail::broadcast_all(world, tensors);
  for (const at::Tensor& tensor : tensors) {
    shared_.emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
  }
}

void JoinedRanks::announce(const Progress& progress, Intent intent) {
  parts_->world().set_step(progress.step);
  if (progress.micro_step == 0 && !detail::same_tensors(trained_, detail::trained_parameters(*parts_))) {
    join_ranks(progress);  // parameters were frozen, unfrozen or added: on every rank, or they disagree here
  }
  if (intent == Intent::micro_step && !sends_in_every_pass()) return;
  statuses_ = StatusExchange(parts_->world(), status_of(intent, progress));
  knows_totals_ = false;
}

void JoinedRanks::await_totals() { add_totals(statuses_.wait()); }

void JoinedRanks::learn_totals() {
  if (!statuses_.is_under_way()) return;
  await_totals();
  knows_totals_ = true;
}

Work JoinedRanks::add_losses() {
  const at::Tensor& loss = parts_->window.loss;
  return loss.defined() ? parts_->world().all_reduce(loss, CollectiveOptions().agreed(true)) : Work();
}

void JoinedRanks::backward_begin(const Progress& progress) {
  if (parts_->world().world_size() == 1) return;
  const bool is_last = progress.micro_step + 1 == progress.micro_steps;
  announce(progress, is_last ? Intent::step : Intent::micro_step);
  begin_pass(progress, is_last);
}

void JoinedRanks::backward_end(const Progress& progress) {
  if (!is_joined()) return;
  const bool is_last = progress.micro_step + 1 == progress.micro_steps;
  end_pass(is_last);
  if (!is_last && statuses_.is_under_way()) std::exchange(statuses_, {}).wait();
}

void JoinedRanks::backward_failed() {
  if (is_joined()) drop();
  // Where the ranks are at different places, that is why an operation failed; this says where they are.
  if (statuses_.is_under_way() && statuses_.is_done()) std::exchange(statuses_, {}).wait();
}

void JoinedRanks::gradients_ready(const Progress& window) {
  if (!is_joined()) return;
  if (std::exchange(knows_totals_, false)) {
    // since its last backward
  } else if (!statuses_.is_under_way()) {  // the window ends early, and so did not begin to travel
    statuses_ = StatusExchange(parts_->world(), status_of(Intent::last_step, window));
    await_totals();
    reduce(window);
  } else {
    await_totals();
  }
  Work loss = add_losses();
  wait();
  loss.wait();
}

// Replicas that take steps of different lengths are no replicas any more.
void JoinedRanks::add_totals(const std::vector<RankStatus>& ranks) {
  for (const RankStatus& rank : ranks) {
    if (std::memcmp(rank.fingerprint, ranks[0].fingerprint, sizeof(rank.fingerprint)) == 0) continue;
    require_agreement(parts_->world(), ranks[0].step, rate_facts(parts_->optimizer()));
  }
  WindowTotals& window = parts_->window;
  window.weight = 0;
  window.tokens = 0;
  for (const RankStatus& rank : ranks) {
    window.weight += rank.weight;
    window.tokens += rank.tokens;
    parts_->should_stop = parts_->should_stop || rank.stop != 0;
    learns_buffers_ = learns_buffers_ || rank.news != 0;
  }
  window.gradient_scale = scale();
}

void JoinedRanks::after_step(StepReport& /*report*/) {
  if (is_joined() && syncs_buffers_) sync_buffers();
}

// By position: '1' where training is known to change the buffer, or changes it here.
std::string JoinedRanks::changed_buffers() const {
  std::string changed = is_changing_;
  changed.resize(buffers_.size(), '0');
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& buffer = buffers_[i];
    const bool is_written = buffer.is_statistic && buffer.owner->is_training();
    if (is_written || buffer.tensor._version() != buffer.version) changed[i] = '1';
  }
  return changed;
}

bool JoinedRanks::sees_new_buffers() const { return syncs_buffers_ && changed_buffers() != is_changing_; }

// A buffer that has changed on any rank is rank 0's on all of them from then on. That there is a new one, all
// have heard with the status of the step.
void JoinedRanks::sync_buffers() {
  Communicator& world = parts_->data_ranks();
  if (std::exchange(learns_buffers_, false)) {
    is_changing_ = changed_buffers();
    for (const std::string& of_rank : world.exchange(is_changing_)) {
      require(of_rank.size() == is_changing_.size(), "the model has ", is_changing_.size(),
              " buffers on this rank, but ", of_rank.size(), " on another; register the same on all of them");
      for (size_t i = 0; i < of_rank.size(); ++i) is_changing_[i] = std::max(is_changing_[i], of_rank[i]);
    }
  }
  std::vector<at::Tensor> changing;
  for (size_t i = 0; i < is_changing_.size(); ++i) {
    if (is_changing_[i] == '1') changing.push_back(buffers_[i].tensor);
  }
  const at::NoGradGuard no_grad;
  detail::broadcast_all(world, changing);
}

void JoinedRanks::finish(const Progress& progress) {
  if (!is_joined()) return;
  RankStatus status;
  status.intent = Intent::finish;
  status.step = progress.step;
  StatusExchange(parts_->world(), status).wait();
}

}  // namespace pacer
