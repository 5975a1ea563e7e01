#include <pacer/hooks/gradient_clipping.h>

#include <cmath>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/optimizers/gradient_guard.h>

namespace pacer {

GradientClipping::GradientClipping(double max_norm) : max_norm_(max_norm) {
  require(std::isfinite(max_norm) && max_norm > 0, "GradientClipping needs a finite norm > 0, not ",
          max_norm);
}

GradientClipping& GradientClipping::by_previous_norm(bool on) & {
  by_previous_norm_ = on;
  return *this;
}
GradientClipping&& GradientClipping::by_previous_norm(bool on) && { return std::move(by_previous_norm(on)); }

std::string GradientClipping::agreement() const {
  return "norm " + exact_text(max_norm_) + (by_previous_norm_ ? ", buckets by the norm before" : "");
}

void GradientClipping::attach(SessionParts& parts) {
  using Look = SessionParts::Look;
  guard_ = parts.guard(by_previous_norm_ ? Look::any_time : Look::first);
  guard_->clip_to(max_norm_, by_previous_norm_);
}

// The exact form goes on from nothing.
void GradientClipping::save(NamedTensors& state) const {
  if (by_previous_norm_) state["previous_norm"] = number_tensor(guard_->read().last_norm);
}

void GradientClipping::load(const NamedTensors& state) {
  if (!by_previous_norm_) return;
  const auto norm = require_number<double>(state, "previous_norm");
  require(std::isfinite(norm) && norm >= 0, "\"previous_norm\" of the state to load is ", norm,
          ", which no norm can be");
  kernels::GradientCheck check = guard_->read();
  check.last_norm = norm;
  guard_->write(check);
}

}  // namespace pacer
