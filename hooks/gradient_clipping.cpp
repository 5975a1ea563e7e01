#include <pacer/hooks/gradient_clipping.h>

#include <cmath>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/optimizers/gradient_guard.h>

namespace pacer {

GradientClipping::GradientClipping(GradientClippingOptions options) : options_(options) {
  require(std::isfinite(options_.max_norm()) && options_.max_norm() > 0,
          "GradientClipping needs a finite norm > 0, not ", options_.max_norm());
}

std::string GradientClipping::agreement() const {
  return "norm " + exact_text(options_.max_norm()) +
         (options_.by_previous_norm() ? ", buckets by the norm before" : "");
}

void GradientClipping::attach(SessionParts& parts) {
  using Look = SessionParts::Look;
  guard_ = parts.guard(options_.by_previous_norm() ? Look::any_time : Look::first);
  guard_->clip_to(options_.max_norm(), options_.by_previous_norm());
}

// The exact form goes on from nothing.
void GradientClipping::save(NamedTensors& state) const {
  if (options_.by_previous_norm()) state["previous_norm"] = number_tensor(guard_->read().last_norm);
}

void GradientClipping::load(const NamedTensors& state) {
  if (!options_.by_previous_norm()) return;
  const auto norm = require_number<double>(state, "previous_norm");
  require(std::isfinite(norm) && norm >= 0, "\"previous_norm\" of the state to load is ", norm,
          ", which no norm can be");
  kernels::GradientCheck check = guard_->read();
  check.last_norm = norm;
  guard_->write(check);
}

}  // namespace pacer
