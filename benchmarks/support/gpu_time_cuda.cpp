#include "gpu_time.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>

namespace bench {

std::string gpu_name() {
  return at::cuda::is_available() ? std::string(at::cuda::getCurrentDeviceProperties()->name) : std::string();
}

Spread time_enqueued(const std::function<void()>& enqueue, double spin_milliseconds,
                     const Patience& patience) {
  at::cuda::CUDAEvent begin(cudaEventDefault);
  at::cuda::CUDAEvent end(cudaEventDefault);
  // Nominal clock; a GPU that boosts further spins a little shorter.
  const double cycles_per_millisecond = at::cuda::getCurrentDeviceProperties()->major >= 8 ? 1.7e6 : 1.4e6;
  return repeat(patience, [&] {
    at::cuda::sleep(static_cast<int64_t>(spin_milliseconds * cycles_per_millisecond));
    begin.record();
    enqueue();
    end.record();
    end.synchronize();
    return static_cast<double>(begin.elapsed_time(end));
  });
}

}  // namespace bench
