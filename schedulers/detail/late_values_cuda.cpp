#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <pacer/schedulers/detail/late_values.h>

namespace pacer::detail {
namespace {

// A tensor in pinned memory, from LibTorch's cache of it: that hands out again only what no copy uses any
// more, so the value may be dropped before it arrives.
class CudaTensor final : public LateTensor {
 public:
  explicit CudaTensor(const at::Tensor& tensor)
      : LateTensor(at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true))) {
    const at::NoGradGuard no_grad;
    value().copy_(tensor, /*non_blocking=*/true);
    event_.record(c10::cuda::getCurrentCUDAStream(tensor.device().index()));
  }
  bool arrived() const override { return event_.query(); }
  void wait() const override { event_.synchronize(); }

 private:
  at::cuda::CUDAEvent event_;
};

}  // namespace

std::unique_ptr<LateTensor> read_late(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return std::make_unique<HostTensor>(tensor);
  const c10::cuda::CUDAGuard device_guard(tensor.device());
  return std::make_unique<CudaTensor>(tensor);
}

}  // namespace pacer::detail
