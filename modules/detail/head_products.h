// The three products of a language model's head and its loss, chunk of rows by chunk: logits, and from their gradients those of
// the hidden states and of the weight.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include <pacer/modules/detail/matrix.h>

namespace pacer::detail {

class HeadProducts {
 public:
  // hidden [rows, in] and weight [columns, in], of one dtype. `in_8_bits`: the two products with the weight are, whose sides are
  // then multiples of 16; Unavailable for a GPU that has no such products. `for_hidden`: its gradient is wanted.
  HeadProducts(const at::Tensor& hidden, const at::Tensor& weight, bool in_8_bits, bool for_hidden);

  bool are_in_8_bits() const { return eight_.has_value(); }
  // [count, columns], of the rows from `first` on.
  at::Tensor logits(int64_t first, int64_t count) const;
  // [count, in] of the gradients of so many rows of logits, [count, columns]; in 8 bits of their `codes`, as
  // kernels/cross_entropy.h makes them.
  void write_hidden_gradient(const at::Tensor& logits, const at::Tensor& codes, const at::Tensor& to) const;
  // Adds that of the weight, logits^T x, of the rows from `first` on, to the `sum` of those before them. Of 16 bits it is an fp32
  // sum where rows come in several chunks: on a GPU the product adds as it multiplies.
  void add_weight_gradient(const at::Tensor& logits, int64_t first, at::Tensor& sum) const;

 private:
  struct InEight {
    Fp8Matrix hidden, weight;
    at::Tensor codes_inverse;  // 1 / what codes were multiplied with, as inverses of an Fp8Matrix are
  };
  at::Tensor hidden_, weight_;
  std::optional<InEight> eight_;
};

}  // namespace pacer::detail
