// What every collective asks of a tensor.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <pacer/core/error.h>

namespace pacer::detail {

inline int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

// Throws InvalidArgument that names operation and tensor.
inline void check_tensor(const char* operation, const char* which, const at::Tensor& tensor,
                         at::Device device) {
  require(tensor.defined(), operation, ": the ", which, " is undefined");
  require(tensor.layout() == at::kStrided && tensor.is_contiguous(), operation, ": the ", which,
          " is not contiguous; pass tensor.contiguous()");
  require(tensor.device() == device, operation, ": the ", which, " is on ", tensor.device().str(),
          ", but this communicator moves tensors on ", device.str());
}

// The output of a gathering operation holds the inputs of so many ranks.
inline void check_gathered(const char* operation, const at::Tensor& output, const at::Tensor& input,
                           int ranks) {
  check_tensor(operation, "input", input, output.device());
  require(input.scalar_type() == output.scalar_type() && output.numel() == input.numel() * ranks, operation,
          ": the output must have ", ranks, " times the input's ", input.numel(),
          " elements, of the same dtype; it has ", output.numel());
}

}  // namespace pacer::detail
