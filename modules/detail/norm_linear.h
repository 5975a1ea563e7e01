// A layer normalisation and the product behind it as one node of the graph.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/modules/detail/fused_call.h>

namespace pacer::detail {

struct NormLinearResults {
  // [rows, out], of the dtype of computing, or three of a third of the columns each, whose gradients are then
  // read where they lie.
  std::vector<at::Tensor> y;
  // x itself. What else needs x takes this: its gradient is then added where that of x is made.
  at::Tensor x;
};
NormLinearResults norm_linear(const FusedCall& call, const Norm& norm, const modules::LinearImpl& linear,
                              bool in_three = false);

}  // namespace pacer::detail
