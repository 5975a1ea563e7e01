#include <pacer/collectives/detail/late_status.h>

#include <cstring>

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace pacer::detail {
namespace {

kernels::OneBitStatus status_in(const at::Tensor& host) {
  kernels::OneBitStatus status{};
  std::memcpy(&status, host.const_data_ptr(), sizeof status);
  return status;
}

}  // namespace

void LateStatus::ask(const at::Tensor& memory) {
  latest();
  if (event_) return;
  if (!pinned_.defined()) {
    pinned_ = at::empty(memory.sizes(), memory.options().device(at::kCPU).pinned_memory(true));
  }
  pinned_.copy_(memory, /*non_blocking=*/true);
  const c10::impl::VirtualGuardImpl device(memory.device().type());
  event_.emplace(memory.device().type());
  event_->record(device.getStream(memory.device()));
}

std::optional<kernels::OneBitStatus> LateStatus::latest() {
  if (event_ && event_->query()) {
    latest_ = status_in(pinned_);
    event_.reset();
  }
  return latest_;
}

kernels::OneBitStatus LateStatus::read(const at::Tensor& memory) { return status_in(memory.cpu()); }

}  // namespace pacer::detail
