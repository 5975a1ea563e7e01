// Buckets of a 1-bit optimizer that travel while backward runs: when they may start, and what a step must
// then find again.
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/host_copy.h>
#include <pacer/optimizers/detail/onebit_overlap.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/detail/step_engine.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {

bool OneBitOptimizer::has_started() const { return overlap_ != nullptr && overlap_->has_started(); }

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
  if (!check_copy_) return;
  check_copy_->wait();
  kernels::GradientCheck check;
  std::memcpy(&check, check_copy_->value().const_data_ptr(), sizeof check);
  require_applied(check.non_finite == 0);
}

void OneBitOptimizer::require_applied(bool applied) const {
  require<Error>(applied, name(),
                 ": a gradient is not finite, and momentum had left before that was known; without "
                 "overlap_backward such steps are skipped");
}

// Compared once, and where ranks are in step: what they send from then on has to fit.
void OneBitOptimizer::agree() {
  if (has_agreed_) return;
  compressed_->agree(attempts_, onebit_->overlap_backward());
  has_agreed_ = true;
}

void OneBitOptimizer::begin_backward(const ComingInputs& inputs) {
  const bool is_half_way = has_started();
  if (overlap_) overlap_->end();
  mark_failed_if_throws([&] {
    require<Error>(
        !is_half_way, name(),
        ": a backward failed, or no step followed it, after momentum had left for the other ranks");
  });
  if (!onebit_->overlap_backward() || kind_of_next_step() != detail::OneBitKind::compressed) return;
  require_intact();
  // Before the first message, what other ranks are at is known: it waits for them.
  if (!has_agreed_ && !inputs()) return;
  agree();
  coming_ = inputs;
  ahead_.reset();
  if (overlap_ == nullptr) {
    std::vector<detail::OneBitOverlap::Entry> entries;
    const auto settings = this->settings();
    for (const detail::RegisteredParameter& parameter : view().parameters()) {
      if (!settings[parameter.group].compresses(parameter.tensor)) continue;
      if (entries.size() == compressed_->tensors()) continue;
      entries.push_back({parameter.name, parameter.tensor, compressed_->turn_of(entries.size())});
    }
    overlap_ = detail::OneBitOverlap::on(
        std::move(entries), {[this](size_t turn) { return start_ahead(turn); },
                             [this] { mark_failed_if_throws([this] { compressed_->serve_ahead(); }); }});
  }
  overlap_->begin();
}

// False where the step has to: its first one plans, as does one in which parameters have changed.
bool OneBitOptimizer::start_ahead(size_t turn) {
  const at::NoGradGuard no_grad;
  if (turn == 0) ahead_ = coming_();
  if (!ahead_ || (turn == 0 && !engine().plan_fits_next_step(param_groups_, settings(), state_)))
    return false;
  GradientGuard* guard = ahead_->guard && ahead_->guard->clips_by_previous() ? ahead_->guard.get() : nullptr;
  if (turn == 0 && guard != nullptr) guard->set_average(ahead_->average);
  const auto [first, end] = compressed_->tensors_at(turn);
  const double local_weight = this->local_weight(*ahead_);
  const auto* scalars = engine().prepare_ahead(ahead_->average, local_weight, first, end);
  if (scalars == nullptr) return false;
  mark_failed_if_throws([&] {
    compressed_->start_ahead(
        turn, {detail::OneBitKind::compressed, local_weight, attempts_, onebit_->refresh_variance_every},
        scalars, guard);
  });
  return true;
}

void OneBitOptimizer::require_as_started(const StepInputs& inputs) {
  if (!has_started()) return;
  mark_failed_if_throws([&] {
    overlap_->check_unchanged();
    require<Error>(
        inputs.average == ahead_->average && inputs.local_weight == ahead_->local_weight &&
            inputs.guard == ahead_->guard,
        name(),
        ": the step is another one than its momentum left for; take it in the Session whose backward "
        "came before");
  });
}

}  // namespace pacer
