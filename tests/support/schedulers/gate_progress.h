// The micro-step that a gate is asked about.
#pragma once

#include <cstdint>

#include <pacer/hooks/progress.h>

namespace pacer::testing {

// The last micro-step of its window.
inline Progress gate_progress(int64_t step, int64_t micro_step = 0, int64_t tokens = 0) {
  Progress progress;
  progress.step = step;
  progress.micro_step = micro_step;
  progress.micro_steps = micro_step + 1;
  progress.tokens = tokens;
  return progress;
}

}  // namespace pacer::testing
