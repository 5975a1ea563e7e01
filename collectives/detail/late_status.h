// What the device writes down of an exchange, as the host learns it: later, without waiting.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <pacer/kernels/onebit.h>

namespace pacer::detail {

class LateStatus {
 public:
  // Enqueues a copy of the OneBitStatus that `memory` is, on the current stream, unless one is under way.
  void ask(const at::Tensor& memory);
  // The last copy that arrived; none before. Never waits.
  std::optional<kernels::OneBitStatus> latest();
  // Of now. Waits for the device.
  static kernels::OneBitStatus read(const at::Tensor& memory);

 private:
  at::Tensor pinned_;
  std::optional<c10::Event> event_;  // of the copy under way
  std::optional<kernels::OneBitStatus> latest_;
};

}  // namespace pacer::detail
