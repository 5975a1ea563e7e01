// What a loss behind a head is given, looked at and as it is computed; what its parts share.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <pacer/kernels/cross_entropy.h>
#include <pacer/modules/linear_cross_entropy.h>

namespace pacer::detail {

// What a loss knows of rows beside their hidden states.
struct LossRows {
  at::Tensor targets;  // Long [rows]
  at::Tensor weights;  // fp32 [rows], undefined: ones

  LossRows narrow(int64_t first, int64_t count) const;
  // How much counts, fp32 [].
  at::Tensor count(int64_t ignore_index) const;
};

struct LossInput {
  at::Tensor hidden;   // [rows, in], in the dtype of computing
  at::Tensor columns;  // [columns, in], in the same
  LossRows rows;
};

// The arguments of linear_cross_entropy, whose errors it throws. `weight` is looked at by its shape, dtype and device only;
// `columns` are those of its rows that are here, all of them or some.
LossInput checked_loss_input(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& columns,
                             const at::Tensor& targets, const modules::LinearCrossEntropyOptions& options,
                             const at::Tensor& row_weights);

// So many rows of logits at once, each of so many bytes.
int64_t rows_of_chunk(int64_t row_bytes, const modules::LinearCrossEntropyOptions& options);

// What the kernel is told of these logits [rows, columns]; results are left out.
kernels::CrossEntropy cross_entropy_of(const at::Tensor& logits, const LossRows& rows,
                                       const modules::LinearCrossEntropyOptions& options);
void run_cross_entropy(const kernels::CrossEntropy& work, at::Device device);

// gradient * factor, a vector of one element, in `dtype`; undefined stays so.
at::Tensor scaled_gradient(const at::Tensor& gradient, const at::Tensor& factor, at::ScalarType dtype);

}  // namespace pacer::detail
