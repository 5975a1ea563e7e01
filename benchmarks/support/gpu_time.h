// Time on a GPU. Without CUDA there is none.
#pragma once

#include <functional>
#include <string>

#include "timing.h"

namespace bench {

// Empty where there is no GPU to use.
std::string gpu_name();

// Milliseconds between events around `enqueue`, which starts work on the current stream, behind a kernel that
// spins for `spin_milliseconds`, as long as the host needs to enqueue the work. Throws pacer::Unavailable in
// a build without CUDA.
Spread time_enqueued(const std::function<void()>& enqueue, double spin_milliseconds,
                     const Patience& patience);

}  // namespace bench
