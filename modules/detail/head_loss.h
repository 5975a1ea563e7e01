// What a loss behind a head is given, looked at and as it is computed; what its parts share.
#pragma once

#include <cstdint>
#include <functional>

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

// What the kernel is told of these logits [rows, columns]; results are left out.
kernels::CrossEntropy cross_entropy_of(const at::Tensor& logits, const LossRows& rows,
                                       const modules::LinearCrossEntropyOptions& options);
void run_cross_entropy(const kernels::CrossEntropy& work, at::Device device);

// What all rows make: their losses, and the gradients of the sum of these, where they are wanted.
struct LossSum {
  at::Tensor losses;  // fp32 [rows]
  at::Tensor hidden;  // [rows, in], of the dtype of computing
  at::Tensor weight;  // [columns, in], fp32 where several chunks of 16 bits were added up
};
// What is made of a chunk: its losses, and in the place of the logits their gradients, where any are wanted; these also in e5m2,
// where codes are defined.
using MakeLosses = std::function<void(const at::Tensor& logits, const LossRows& rows,
                                      const at::Tensor& losses, const at::Tensor& codes)>;
// The rows in chunks of so many of logits, of `chunk_columns` each.
LossSum loss_sum(const at::Tensor& hidden, const at::Tensor& columns, const LossRows& of_rows,
                 const modules::LinearCrossEntropyOptions& options, int64_t chunk_columns, bool for_hidden,
                 bool for_weight, const MakeLosses& make);

// gradient * factor, a vector of one element, in `dtype`; undefined stays so.
at::Tensor scaled_gradient(const at::Tensor& gradient, const at::Tensor& factor, at::ScalarType dtype);

}  // namespace pacer::detail
