// A build without CUDA: every tensor is on the host.
#include <pacer/schedulers/detail/late_values.h>

namespace pacer::detail {

std::unique_ptr<LateTensor> read_late(const at::Tensor& tensor) {
  return std::make_unique<HostTensor>(tensor);
}

}  // namespace pacer::detail
