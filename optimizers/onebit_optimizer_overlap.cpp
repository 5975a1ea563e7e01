// Buckets of a 1-bit optimizer that travel while backward runs: when they may start, and what a step must
// then find again.
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/host_copy.h>
#include <pacer/optimizers/detail/onebit_overlap.h>
#include <pacer/optimizers/detail/onebit_setup.h>
#include <pacer/optimizers/detail/step_engine.h>
#include <pacer/optimizers/onebit_optimizer.h>

namespace pacer {

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
  if (!onebit_->overlap_backward() || kind_of_next_step() != detail::OneBitKind::compressed) return;
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
    mark_failed_if_throws([&] { begin(detail::OneBitKind::compressed, *onebit_, *ahead_.inputs); });
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
