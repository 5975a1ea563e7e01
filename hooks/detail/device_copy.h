// Brings a tensor of a batch to the training device without waiting for it.
#pragma once

#include <ATen/core/Tensor.h>

namespace pacer::detail {

// The tensor itself if it is there. From the CPU to a GPU through pinned memory, so that the copy is enqueued
// and the host goes on; the pinned memory stays reserved until the copy is done.
inline at::Tensor copy_to_device(const at::Tensor& tensor, at::Device device) {
  if (tensor.device() == device) return tensor;
  if (device.is_cuda() && tensor.device().is_cpu() && tensor.layout() == at::kStrided) {
    const at::Tensor pinned = tensor.is_pinned() ? tensor : tensor.contiguous().pin_memory();
    return pinned.to(device, /*non_blocking=*/true);
  }
  return tensor.to(device);
}

}  // namespace pacer::detail
