// Matrices as kernels take them: without gaps, beginning at a multiple of 16 bytes, in fp32, bf16 or fp16.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <pacer/kernels/math/element_type.h>

namespace pacer::detail {

inline bool is_castable(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}
inline bool is_castable(const at::Tensor& x) { return is_castable(x.scalar_type()); }

inline kernels::ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kBFloat16:
      return kernels::ElementType::bf16;
    case at::kHalf:
      return kernels::ElementType::f16;
    default:
      return kernels::ElementType::f32;
  }
}

// A copy only where it must be.
inline at::Tensor readable(const at::Tensor& x) {
  const at::Tensor dense = x.contiguous();
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

// All dimensions but the last as one.
inline at::Tensor as_rows(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// A matrix in 8-bit floats: uint8 [rows, columns], its transpose, what products are multiplied with, fp32
// [1], and the sums of its columns before the cast, fp32 [columns]. Undefined is what was not wanted.
struct Fp8Matrix {
  at::Tensor codes, transposed, inverse, sums;
};

// What a product multiplies: `values` in the dtype of computing, or codes.
struct Operand : Fp8Matrix {
  at::Tensor values;
};

}  // namespace pacer::detail
