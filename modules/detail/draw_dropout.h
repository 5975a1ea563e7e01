// The seed of a dropout whose mask is never stored.
#pragma once

#include <ATen/core/Tensor.h>

#include <pacer/kernels/math/dropout.h>

namespace pacer::detail {

// Drops with probability p, 0 <= p < 1, by a seed from LibTorch's generator of the CPU, whatever the device;
// nothing for p = 0. Error while a CUDA graph is captured on `device`, because each replay would drop the
// same elements.
kernels::Dropout draw_dropout(double p, at::Device device);

}  // namespace pacer::detail
