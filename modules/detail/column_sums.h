// Memory for the sums of the columns of a matrix, as kernels/fp8.h makes them.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/kernels/fp8.h>

namespace pacer::detail {

// For a sum of each column; without rows nothing adds up, and it is zero.
inline at::Tensor column_memory(int64_t rows, int64_t columns, at::Device device) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  return rows == 0 ? at::zeros({columns}, options) : at::empty({columns}, options);
}

struct ColumnSums {
  ColumnSums(bool are_wanted, int64_t rows, int64_t columns, at::Device device) {
    if (!are_wanted) return;
    sums = column_memory(rows, columns, device);
    partials = at::empty({kernels::fp8_parts(rows), columns}, sums.options());
  }

  float* partials_memory() const { return partials.defined() ? partials.mutable_data_ptr<float>() : nullptr; }
  float* sums_memory() const { return sums.defined() ? sums.mutable_data_ptr<float>() : nullptr; }

  at::Tensor partials, sums;  // undefined: not wanted
};

}  // namespace pacer::detail
