// Time on a GPU, for a program that is also built without CUDA.
#pragma once

#include <functional>
#include <string>

#include "bench/timing.h"

namespace nf4_bench {

// Empty where there is no GPU to use.
std::string gpu_name();

// Milliseconds on the device of what `enqueue` starts on the current stream.
bench::Spread time_on_gpu(const std::function<void()>& enqueue, const bench::Patience& patience);

}  // namespace nf4_bench
