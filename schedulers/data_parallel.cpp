#include <pacer/schedulers/data_parallel.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>
#include <torch/version.h>

#include <pacer/core/checksum.h>
#include <pacer/core/error.h>
#include <pacer/core/version.h>
#include <pacer/schedulers/detail/model_facts.h>
#include <pacer/schedulers/detail/number_text.h>
#include <pacer/schedulers/session_parts.h>
#include <pacer/schedulers/step_report.h>

namespace pacer {
namespace {

// What DataParallel::facts leaves out, because schedules move it: ranks compare these in each step.
std::vector<Fact> rate_facts(const torch::optim::Optimizer& optimizer) {
  std::vector<Fact> facts;
  for (const double rate : detail::learning_rates(optimizer)) {
    facts.push_back(
        {detail::concatenate("learning rate of parameter group ", facts.size()), detail::exact_text(rate)});
  }
  return facts;
}

RankStatus status_of(Intent intent, const Progress& progress, const SessionParts& parts,
                     bool buffers_have_changed) {
  RankStatus status;
  status.intent = intent;
  status.step = progress.step;
  status.micro_steps = progress.micro_steps;
  status.weight = parts.window.weight;
  status.tokens = parts.window.tokens;
  const std::vector<double> rates = detail::learning_rates(parts.optimizer());
  const std::string_view bytes(reinterpret_cast<const char*>(rates.data()), rates.size() * sizeof(double));
  checksum_of(bytes).copy(status.fingerprint, sizeof(status.fingerprint));
  status.stop = parts.asks_to_stop && parts.asks_to_stop() ? 1 : 0;
  status.news = buffers_have_changed ? 1 : 0;
  return status;
}

}  // namespace

void DataParallel::attach(SessionParts& parts) {
  require(parts.world_was_given,
          "DataParallel needs to know its peers; give the Session a Communicator: Session(model, optimizer, "
          "Communicator::from_environment())");
  require(parts.world().device() == parts.device(), "the model is on ", parts.device().str(), ", but ",
          parts.world().backend_name(), " joins the ranks on ", parts.world().device().str(),
          "; call model->to(world->device()) before the optimizer is made");
  parts_ = &parts;
}

void DataParallel::start(const Progress& progress) {
  if (parts_->world().world_size() > 1) join_ranks(progress);
}

std::vector<Fact> DataParallel::facts() const {
  std::vector<Fact> facts = {
      {"library", detail::concatenate("pacer ", version(), ", LibTorch ", TORCH_VERSION)},
      {"communicator", detail::concatenate(parts_->world().backend_name(), ", ordered sums ",
                                           parts_->world().options().ordered_sum() ? "on" : "off")},
      {"buckets",
       detail::concatenate(
           options_.bucket_bytes() ? std::to_string(*options_.bucket_bytes()) : "default", " and ",
           options_.first_bucket_bytes(), " bytes, wire ",
           options_.wire_dtype() ? c10::toString(*options_.wire_dtype()) : "as it is",
           !options_.in_place()   ? ""
           : *options_.in_place() ? ", in place"
                                  : ", flat memory",
           ", unused parameters ", options_.unused_is_zero() ? "are zero" : "are an error", ", buffers ",
           options_.sync_buffers() ? "follow rank 0" : "are each rank's own", ", initial parameters ",
           options_.initial_parameters() == InitialParameters::check ? "are compared" : "are rank 0's")},
      {"micro-steps",
       detail::concatenate(parts_->micro_steps, parts_->weight_by_tokens ? " weighted by tokens" : "")},
  };
  std::string hooks;
  for (const auto& hook : parts_->hooks()) hooks += (hooks.empty() ? "" : ", ") + hook->hook_name();
  facts.push_back({"hooks", hooks});
  for (const auto& hook : parts_->hooks()) facts.push_back({"hook " + hook->hook_name(), hook->agreement()});
  for (Fact& fact : detail::optimizer_facts(*parts_)) facts.push_back(std::move(fact));
  for (Fact& fact : detail::parameter_facts(*parts_)) facts.push_back(std::move(fact));
  return facts;
}

void DataParallel::join_ranks(const Progress& progress) {
  parts_->world().set_step(progress.step);
  require_agreement(parts_->world(), progress.step, facts());
  share_parameters();
  BucketOptions options;
  options.bucket_bytes(options_.bucket_bytes()).first_bucket_bytes(options_.first_bucket_bytes());
  options.wire_dtype(options_.wire_dtype()).unused_is_zero(options_.unused_is_zero());
  options.in_place(options_.in_place());
  bucketer_.reset();  // takes its hooks from the parameters before the next one adds its own
  const auto named = detail::named_optimizer_parameters(*parts_);
  std::vector<at::Tensor> may_stay_local;
  if (parts_->session_optimizer()) may_stay_local = parts_->session_optimizer()->local_parameters();
  bucketer_ = std::make_unique<GradientBucketer>(named, parts_->shared_world(), options, may_stay_local);
  look_early();
  trained_ = detail::trained_parameters(*parts_);
  if (saved_order_.size() == trained_.size()) bucketer_->use_order(saved_order_);
  saved_order_.clear();
}

// Before the first pass, and behind a load.
void DataParallel::forward_begin(const Progress& /*progress*/) {
  if (!buffers_.empty() || !options_.sync_buffers()) return;
  for (const auto& module : parts_->model().modules(/*include_self=*/false)) remember_buffers(module);
  // The model itself may not be held by a shared_ptr; it outlives this hook.
  remember_buffers(std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &parts_->model()));
}

void DataParallel::remember_buffers(const std::shared_ptr<torch::nn::Module>& owner) {
  for (const auto& item : owner->named_buffers(/*recurse=*/false)) {
    if (!item.value().defined()) continue;
    const bool is_statistic = item.key() == "running_mean" || item.key() == "running_var";
    buffers_.push_back({item.value(), owner, is_statistic, item.value()._version()});
  }
}

// Where a step begins with the norm of the gradients, each bucket's part of it is computed while later
// buckets are still on their way.
void DataParallel::look_early() {
  SessionOptimizer* optimizer = parts_->session_optimizer();
  if (optimizer == nullptr || !parts_->has_guard()) return;
  bucketer_->on_arrival(
      [optimizer](const std::vector<at::Tensor>& parameters) { optimizer->look_early(parameters); });
}

void DataParallel::share_parameters() {
  const at::NoGradGuard no_grad;
  Communicator& world = parts_->world();
  if (options_.initial_parameters() == InitialParameters::check) {
    std::vector<Fact> values;
    for (const auto& item : parts_->model().named_parameters()) {
      const at::Tensor host = item.value().detach().cpu().contiguous();
      const auto bytes = static_cast<size_t>(host.numel()) * host.element_size();
      values.push_back({"initial value of parameter " + item.key(),
                        "checksum " + Checksum().add(host.const_data_ptr(), bytes).hex()});
    }
    require_agreement(world, parts_->progress.step, values);
    return;
  }
  std::vector<at::Tensor> tensors = parts_->model().parameters();
  for (const at::Tensor& tensor : detail::all_optimizer_parameters(*parts_)) tensors.push_back(tensor);
  for (const at::Tensor& buffer : parts_->model().buffers()) tensors.push_back(buffer);
  detail::broadcast_all(world, tensors);
}

void DataParallel::backward_begin(const Progress& progress) {
  Communicator& world = parts_->world();
  if (world.world_size() == 1) return;
  world.set_step(progress.step);
  if (progress.micro_step == 0 && !detail::same_tensors(trained_, detail::trained_parameters(*parts_))) {
    join_ranks(progress);  // parameters were frozen, unfrozen or added: on every rank, or they disagree here
  }
  if (progress.micro_step == 0 && parts_->session_optimizer()) {
    bucketer_->set_scope(parts_->session_optimizer()->gradient_scope());
  }
  if (progress.micro_step + 1 < progress.micro_steps) return;
  statuses_ = StatusExchange(world, status_of(Intent::step, progress, *parts_, sees_new_buffers()));
  Progress window = progress;
  window.micro_step = 0;
  bucketer_->begin_backward(parts_->unused(window), parts_->unused(progress));
}

void DataParallel::backward_end(const Progress& progress) {
  if (bucketer_ && progress.micro_step + 1 == progress.micro_steps) bucketer_->end_backward();
}

void DataParallel::backward_failed() {
  if (bucketer_) bucketer_->drop();
  // Where the ranks are at different places, that is why an operation failed; this says where they are.
  if (statuses_.is_under_way() && statuses_.is_done()) std::exchange(statuses_, {}).wait();
}

void DataParallel::gradients_ready(const Progress& window) {
  if (!bucketer_) return;
  if (!statuses_.is_under_way()) {  // the window ends early, and so did not begin to travel
    statuses_ =
        StatusExchange(parts_->world(), status_of(Intent::last_step, window, *parts_, sees_new_buffers()));
    add_totals(statuses_.wait());
    bucketer_->reduce(parts_->unused(window));
  } else {
    add_totals(statuses_.wait());
  }
  Work loss;
  if (parts_->window.loss.defined()) {
    loss = parts_->world().all_reduce(parts_->window.loss, CollectiveOptions().agreed(true));
  }
  bucketer_->wait();
  loss.wait();
}

// Replicas that take steps of different lengths are no replicas any more.
void DataParallel::add_totals(const std::vector<RankStatus>& ranks) {
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
  window.gradient_scale = bucketer_->scale();
}

void DataParallel::after_step(StepReport& /*report*/) {
  if (bucketer_ && options_.sync_buffers()) sync_buffers();
}

// By position: '1' where training is known to change the buffer, or changes it here.
std::string DataParallel::changed_buffers() const {
  std::string changed = is_changing_;
  changed.resize(buffers_.size(), '0');
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& buffer = buffers_[i];
    const bool is_written = buffer.is_statistic && buffer.owner->is_training();
    if (is_written || buffer.tensor._version() != buffer.version) changed[i] = '1';
  }
  return changed;
}

bool DataParallel::sees_new_buffers() const {
  return options_.sync_buffers() && changed_buffers() != is_changing_;
}

// A buffer that has changed on any rank is rank 0's on all of them from then on. That there is a new one, all
// have heard with the status of the step.
void DataParallel::sync_buffers() {
  Communicator& world = parts_->world();
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

void DataParallel::save(NamedTensors& state) const {
  const std::vector<int64_t> order = bucketer_ ? bucketer_->order() : saved_order_;
  const at::Tensor tensor = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), tensor.mutable_data_ptr<int64_t>());
  state["bucket_order"] = tensor;
}

void DataParallel::load(const NamedTensors& state) {
  const at::Tensor order = require_tensor(state, "bucket_order");
  require(order.scalar_type() == at::kLong && order.dim() == 1,
          "\"bucket_order\" of the checkpoint is no list of positions");
  const auto* positions = order.const_data_ptr<int64_t>();
  std::vector<int64_t> saved(positions, positions + order.numel()), sorted = saved;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    require(sorted[i] == static_cast<int64_t>(i), "\"bucket_order\" of the checkpoint is no permutation");
  }
  saved_order_ = std::move(saved);
}

void DataParallel::finish(const Progress& progress) {
  if (!bucketer_) return;
  RankStatus status;
  status.intent = Intent::finish;
  status.step = progress.step;
  StatusExchange(parts_->world(), status).wait();
}

}  // namespace pacer
