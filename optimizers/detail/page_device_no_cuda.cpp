// Stands in for page_device_cuda.cpp in a build without CUDA.
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/page_device.h>

namespace pacer::detail {

std::unique_ptr<PageDevice> make_page_device(c10::Device device) {
  require(!device.is_cpu(),
          "paged() is for parameters on a GPU; parameters on the CPU have their state in host memory anyway; "
          "leave out paged()");
  throw Unavailable("this pacer was built without CUDA: configure it with -DPACER_CUDA=ON to page state");
}

}  // namespace pacer::detail
