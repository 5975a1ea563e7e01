#include <pacer/schedulers/gradient_clipping.h>

#include <cmath>

#include <pacer/core/error.h>
#include <pacer/schedulers/detail/number_text.h>
#include <pacer/schedulers/session_parts.h>

namespace pacer {

GradientClipping::GradientClipping(double max_norm) : max_norm_(max_norm) {
  require(std::isfinite(max_norm) && max_norm > 0, "GradientClipping needs a finite norm > 0, not ",
          max_norm);
}

std::string GradientClipping::agreement() const { return "norm " + detail::exact_text(max_norm_); }

void GradientClipping::attach(SessionParts& parts) { parts.guard()->clip_to(max_norm_); }

}  // namespace pacer
