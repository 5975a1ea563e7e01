// How far training has come: what every schedule and every random decision is a function of. All ranks hold
// the same values; nothing here knows of devices or of the optimizer.
#pragma once

#include <cstdint>

namespace pacer {

// The default is the first micro-step of the first step of a run.
struct Progress {
  int64_t step = 0;         // attempts completed before this one; a skipped step counts
  int64_t micro_step = 0;   // in [0, micro_steps)
  int64_t micro_steps = 1;  // forward and backward passes per step
  int64_t tokens = 0;       // tokens trained on before this step, over all ranks
};

}  // namespace pacer
