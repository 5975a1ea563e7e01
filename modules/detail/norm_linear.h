// A layer normalisation and the product behind it as one node of the graph; as one node each where the linear layer
// has an adapter that takes part or a weight in 4 bits.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/modules/detail/fused_call.h>
#include <pacer/modules/detail/head_rows.h>

namespace pacer::detail {

struct NormLinearResults {
  // [rows, out], of the dtype of computing, or the three of split_heads, whose gradients are read where they lie.
  std::vector<at::Tensor> y;
  // x itself. What else needs x takes this: its gradient is then added where that of x is made.
  at::Tensor x;
};
// `heads`: how results are split for attention, and what is done to them before; null: they are one.
NormLinearResults norm_linear(const FusedCall& call, const Norm& norm, const modules::LinearImpl& linear,
                              const HeadRows* heads = nullptr);

}  // namespace pacer::detail
