#include <pacer/device/detail/host_copy.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace pacer::detail {
namespace {

class CopyOnHost final : public HostCopy {
 public:
  explicit CopyOnHost(const at::Tensor& tensor) : HostCopy(tensor.detach().clone()) {}
  bool arrived() const override { return true; }
  void wait() const override {}
};

// A tensor in pinned memory, from LibTorch's cache of it: that hands out again only what no copy uses any
// more, so the value may be dropped before it arrives.
class CopyFromGpu final : public HostCopy {
 public:
  explicit CopyFromGpu(const at::Tensor& tensor)
      : HostCopy(at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true))),
        event_(tensor.device().type()) {
    const at::NoGradGuard no_grad;
    value().copy_(tensor, /*non_blocking=*/true);
    event_.record(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
  }
  bool arrived() const override { return event_.query(); }
  void wait() const override { event_.synchronize(); }

 private:
  c10::Event event_;
};

}  // namespace

std::unique_ptr<HostCopy> start_host_copy(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return std::make_unique<CopyOnHost>(tensor);
  const c10::DeviceGuard guard(tensor.device());
  return std::make_unique<CopyFromGpu>(tensor);
}

}  // namespace pacer::detail
