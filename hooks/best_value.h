// The best of a sequence of measurements, as a pure rule: what counts as better, and for how many
// measurements nothing was. Early stopping after Prechelt, "Early Stopping - But When?" (1998), with
// patience.
#pragma once

#include <cmath>
#include <cstdint>

namespace pacer {

struct BestValue {
  double value = 0;
  int64_t step = -1;  // when it was measured; -1: there is none yet
  int64_t since = 0;  // measurements after it

  // Better by more than `min_delta`, or the first number; NaN is never better.
  bool is_beaten_by(double candidate, double min_delta, bool larger_is_better) const {
    if (std::isnan(candidate)) return false;
    if (step < 0) return true;
    return larger_is_better ? candidate - min_delta > value : candidate + min_delta < value;
  }

  // Takes a measurement. True where it is the new best.
  bool take(double candidate, int64_t at_step, double min_delta, bool larger_is_better) {
    if (!is_beaten_by(candidate, min_delta, larger_is_better)) {
      ++since;
      return false;
    }
    *this = {candidate, at_step, 0};
    return true;
  }
};

}  // namespace pacer
