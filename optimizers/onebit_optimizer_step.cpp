// The steps of a 1-bit optimizer: which kind comes next, its three parts, what a step without a Session adds over
// the ranks, and buckets that travel while backward runs.
#include <pacer/optimizers/onebit_optimizer.h>

#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/failure_text.h>
#include <pacer/device/detail/host_copy.h>
#include <pacer/optimizers/detail/compressed_parameters.h>
#include <pacer/optimizers/detail/onebit_overlap.h>
#include <pacer/optimizers/detail/step_across_ranks.h>
#include <pacer/optimizers/detail/step_engine.h>

namespace pacer {

using Kind = detail::OneBitKind;

detail::OneBitKind OneBitOptimizer::kind_of_next_step() const {
  if (!frozen_at_) return Kind::warm_up;
  const int64_t every = onebit_->refresh_variance_every();
  if (every > 0 && (attempts_ + 1 - *frozen_at_) % every == 0) return Kind::refresh;
  return compressed()->compresses() ? Kind::compressed : Kind::dense;
}

void OneBitOptimizer::announce_phase() const {
  static constexpr const char* kNames[] = {"warm-up", "compressed", "frozen", "refresh"};  // by kind
  world_->set_phase(kNames[static_cast<size_t>(kind_of_next_step())]);
}

GradientScope OneBitOptimizer::gradient_scope() const {
  if (kind_of_next_step() != Kind::compressed) return GradientScope::world;
  return onebit_->route.is_by_nodes() ? GradientScope::node : GradientScope::rank;
}

// ---- The three parts. ----

void OneBitOptimizer::prepare(const StepInputs& inputs) {
  const at::NoGradGuard no_grad;
  require_intact();
  require(!inputs.replayable, name(),
          " talks to other ranks in the middle of a step, so that it cannot be replayed from a CUDA "
          "graph; leave the CudaGraph hook out");
  adopt_foreign_options();
  check_device();
  auto settings = this->settings();
  const detail::OneBitSetup onebit = setup_for(settings);
  require(onebit.freeze_automatically() == onebit_->freeze_automatically(), name(),
          ": freeze_automatically was set or changed in the middle of a run; build a new optimizer");
  require(
      attempts_ == 0 || onebit.exchanges_like(*onebit_), name(),
      ": which groups are compressed, and how, was changed after step ", attempts_,
      "; set compress, compress_vectors, one_bit, compress_alone, bucket_bytes, variance_floor and scales "
      "before the first one");
  require(!frozen_at_ || onebit.compressed.size() == onebit_->compressed.size(), name(),
          ": a parameter group was added after the variance froze (step ", frozen_at_.value_or(0),
          "), which has seen nothing of the new parameters; add it before");
  const Kind kind = kind_of_next_step();
  if (frozen_at_) begin(kind, onebit, inputs);
  require_as_started(inputs);
  StepInputs with_guard = inputs;
  if (with_guard.guard == nullptr) with_guard.guard = alone_.guard;
  engine().prepare(param_groups_, std::move(settings), state_, names(), with_guard);
  inputs_ = std::move(with_guard);
  *onebit_ = onebit;
  kind_ = kind;
}

// Times average times the local weight, stored gradients that were not added over the world are their worker's
// mean.
void OneBitOptimizer::begin(Kind kind, const detail::OneBitSetup& onebit, const StepInputs& inputs) {
  double local_weight = inputs.local_weight;
  if (onebit.route.is_by_nodes() || shard_ranks_) local_weight = static_cast<double>(onebit.route.workers());
  compressed()->begin({kind, local_weight, attempts_, onebit.refresh_variance_every()});
  if (kind == Kind::compressed) compressed()->agree(attempts_, onebit.overlap_backward());
}

bool OneBitOptimizer::enqueue() {
  bool applied = false;
  mark_failed_if_throws([&] {
    require_finite();
    applied = FusedOptimizer::enqueue();
    require_applied(applied || !has_started());
    // Only the device knows yet.
    const bool is_late = has_started() && inputs_.guard->device().is_cuda();
    ahead_.late_check = is_late ? detail::start_host_copy(inputs_.guard->memory()) : nullptr;
    if (ahead_.overlap) ahead_.overlap->end();
  });
  return applied;
}

void OneBitOptimizer::conclude(bool applied) {
  mark_failed_if_throws([&] {
    ++attempts_;
    FusedOptimizer::conclude(applied);
    if (kind_ == Kind::warm_up) consider_freeze();
    announce_phase();  // already here: a Session's gradients travel before the next prepare()
  });
}

void OneBitOptimizer::mark_failed_if_throws(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& error) {
    detail::keep_failure(error, failure_);
    throw;
  }
}

void OneBitOptimizer::require_intact() const {
  require<Error>(failure_.empty(), name(), ": a step failed half-way (", failure_,
                 "), and what its state is worth is unknown; load a checkpoint");
}

// ---- Without a Session, which would have added gradients over the ranks. ----

StepInputs OneBitOptimizer::plain_step_inputs() {
  require(!onebit_->overlap_backward(), name(),
          ": overlap_backward(true) needs a Session, which knows the last backward of a step; leave it out");
  if (world_->world_size() == 1) return {};
  require_intact();
  adopt_foreign_options();
  return alone_.across_ranks->inputs(view(), attempts_, local_parameters(), gradient_scope());
}

// ---- Buckets that travel while backward runs. ----

bool OneBitOptimizer::has_started() const {
  return ahead_.overlap != nullptr && ahead_.overlap->has_started();
}

void OneBitOptimizer::require_nothing_in_flight() const {
  require_intact();
  require<Error>(
      !has_started(), name(),
      ": its momentum is on the way to the other ranks, since a backward without a step; save after "
      "step(), or where that backward failed load a checkpoint");
  require_finite();
}

// What is known of the last step that had begun in backward; waits for a GPU.
void OneBitOptimizer::require_finite() const {
  if (!ahead_.late_check) return;
  ahead_.late_check->wait();
  kernels::GradientCheck check;
  std::memcpy(&check, ahead_.late_check->value().const_data_ptr(), sizeof check);
  require_applied(check.non_finite == 0);
}

void OneBitOptimizer::require_applied(bool applied) const {
  require<Error>(applied, name(),
                 ": a gradient is not finite, and momentum had left before that was known; without "
                 "overlap_backward such steps are skipped");
}

void OneBitOptimizer::begin_backward(const ComingInputs& inputs) {
  const bool is_half_way = has_started();
  if (ahead_.overlap) ahead_.overlap->end();
  mark_failed_if_throws([&] {
    require<Error>(
        !is_half_way, name(),
        ": a backward failed, or no step followed it, after momentum had left for the other ranks");
  });
  if (!onebit_->overlap_backward() || kind_of_next_step() != Kind::compressed) return;
  require_intact();
  // Before the first message, what other ranks are at is known: it waits for them.
  if (!compressed()->has_agreed() && !inputs()) return;
  compressed()->agree(attempts_, /*in_lanes=*/true);
  ahead_.coming = inputs;
  ahead_.inputs.reset();
  if (ahead_.overlap == nullptr) {
    std::vector<detail::OneBitOverlap::Entry> entries;
    const auto settings = this->settings();
    for (const detail::RegisteredParameter& parameter : view().parameters()) {
      if (!settings[parameter.group].compresses(parameter.tensor)) continue;
      if (entries.size() == compressed()->tensors()) continue;
      entries.push_back({parameter.name, parameter.tensor, compressed()->turn_of(entries.size())});
    }
    ahead_.overlap = detail::OneBitOverlap::on(
        std::move(entries), {[this](size_t turn) { return start(turn); },
                             [this] { mark_failed_if_throws([this] { compressed()->serve(); }); }});
  }
  ahead_.overlap->begin();
}

// False where the step has to: its first one plans, as does one in which parameters have changed.
bool OneBitOptimizer::start(size_t turn) {
  const at::NoGradGuard no_grad;
  if (turn == 0) {
    ahead_.inputs = ahead_.coming();
    if (!ahead_.inputs || !engine().plan_fits_next_step(param_groups_, settings(), state_)) return false;
    mark_failed_if_throws([&] { begin(Kind::compressed, *onebit_, *ahead_.inputs); });
  }
  const double average = ahead_.inputs->average;
  GradientGuard* guard = ahead_.inputs->guard.get();
  if (guard != nullptr && !guard->clips_by_previous()) guard = nullptr;
  if (turn == 0 && guard != nullptr) guard->set_average(average);
  const auto [first, end] = compressed()->tensors_at(turn);
  const auto* scalars = engine().prepare_ahead(average, compressed()->local_weight(), first, end);
  if (scalars == nullptr) return false;
  mark_failed_if_throws([&] { compressed()->start(turn, scalars, guard); });
  return true;
}

void OneBitOptimizer::require_as_started(const StepInputs& inputs) {
  if (!has_started()) return;
  mark_failed_if_throws([&] {
    ahead_.overlap->check_unchanged();
    require<Error>(
        inputs.average == ahead_.inputs->average && inputs.local_weight == ahead_.inputs->local_weight &&
            inputs.guard == ahead_.inputs->guard,
        name(),
        ": the step is another one than its momentum left for; take it in the Session whose backward "
        "came before");
  });
}

}  // namespace pacer
