// The fp32 values that bf16 parameters and what lies below them stand for, as operations on whole tensors: a 16-bit
// remainder (kernels/math/half_types.h) or an 8-bit correction (kernels/math/weight_correction.h), told apart by dtype.
#pragma once

#include <ATen/core/Tensor.h>

namespace pacer::detail {

// Whether a tensor of that dtype can be a remainder (int16) or a correction (int8).
constexpr bool is_remainder_dtype(at::ScalarType dtype) { return dtype == at::kShort || dtype == at::kChar; }

// Returns the fp32 value of a bf16 tensor and a remainder of its shape, as the kernels' join and join_24 do.
at::Tensor joined_value(const at::Tensor& rounded, const at::Tensor& remainder);

// Splits fp32 values as the kernels' split (int16) and split_24 (int8) do, to the bit but for the bits of a NaN.
struct SplitValue {
  at::Tensor rounded;  // bf16
  at::Tensor remainder;
};
SplitValue split_value(const at::Tensor& value, at::ScalarType remainder_dtype);

}  // namespace pacer::detail
