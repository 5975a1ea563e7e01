#include <pacer/collectives/detail/cuda_stream.h>
#include <pacer/core/error.h>

namespace pacer::detail {

kernels::Stream current_stream(c10::Device device) {
  throw Unavailable(
      concatenate("a parameter is on ", device,
                  ", but this pacer was built without CUDA: configure it with -DPACER_CUDA=ON (a CUDA "
                  "toolkit is needed) or move the parameters to the CPU"));
}

bool is_capturing(c10::Device device) { return current_stream(device) != nullptr; }

}  // namespace pacer::detail
