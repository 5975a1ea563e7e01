// Time on a GPU: what the device needs for a step, what a loop of steps takes, and what the calls cost the
// host.
#pragma once

#include <functional>
#include <vector>

#include "result.h"
#include "support/timing.h"

namespace bench::kernels {

struct CudaPatience {
  Patience device;
  Patience called;      // runs of steps
  int64_t steps_a_run;  // at most
  Patience host;
};

// Times `step`, which enqueues work on the current stream (not the default stream, so that it can be
// captured) and has been called before. Three timings:
//   called: wall clock per step over a run of steps that a synchronisation ends;
//   host:   wall clock of one call, the queue being empty;
//   device: between two events around the replay of the step as a CUDA graph. A kernel that spins goes
//           first, so that the device never waits for the host. A step that cannot be captured is enqueued
//           behind a longer spin.
std::vector<Timing> time_on_cuda(const std::function<void()>& step, const CudaPatience& patience,
                                 const Ceiling& ceiling);

}  // namespace bench::kernels
