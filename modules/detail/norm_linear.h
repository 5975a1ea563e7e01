// A layer normalisation and the product behind it as one node of the graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/normalization.h>

#include <pacer/modules/detail/fused_call.h>

namespace pacer::detail {

struct NormLinearResults {
  at::Tensor y;  // [rows, out], of the dtype of computing
  // x itself. What else needs x takes this: its gradient is then added where that of x is made.
  at::Tensor x;
};
NormLinearResults norm_linear(const FusedCall& call, const torch::nn::LayerNormImpl& norm,
                              const nn::LinearImpl& linear);

}  // namespace pacer::detail
