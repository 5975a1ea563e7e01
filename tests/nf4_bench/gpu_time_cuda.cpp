#include "gpu_time.h"

#include <ATen/cuda/CUDAContext.h>

#include "bench/cuda_timing.h"

namespace nf4_bench {
namespace {

constexpr double kSpinMilliseconds = 0.2;  // in which the host enqueues a few kernels

}  // namespace

std::string gpu_name() {
  return at::cuda::is_available() ? std::string(at::cuda::getCurrentDeviceProperties()->name) : std::string();
}

bench::Spread time_on_gpu(const std::function<void()>& enqueue, const bench::Patience& patience) {
  return bench::time_enqueued(enqueue, kSpinMilliseconds, patience);
}

}  // namespace nf4_bench
