// The time of a short pass over memory, on a GPU or a thread of the CPU, and the copy that it is held against.
#pragma once

#include <cstdint>
#include <functional>

#include <c10/core/Device.h>

#include "timing.h"

namespace bench {

// The median of 25, after 5 that do not count. On a GPU without what the host takes to enqueue a few kernels.
Spread time_pass(at::Device device, const std::function<void()>& work);

// Bytes read plus written per second between buffers of so many numbers of 4 bytes on the CPU, of 2^29 on a GPU: far larger
// than any cache.
double copy_bandwidth(at::Device device, int64_t count_on_cpu);
// The same of a copy that moves about so many bytes, reading and writing; several take turns, so that none is in the cache.
double copy_bandwidth_of(at::Device device, double bytes);

}  // namespace bench
