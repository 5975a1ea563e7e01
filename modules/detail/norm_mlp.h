// A feed-forward network behind its layer normalisation, with the residual connections before and behind it,
// as one node of the graph:
//
//   s = x + drop(branch W^T + bias)              where there is a projection, else s = x
//   y = s + drop(fc2(activation(fc1(norm(s)))))  or without s +
//
// Where a linear layer has an adapter that takes part or a weight in 4 bits, its product is a node of its own, and so
// is what stands around it: the projection's with the sum behind it, or all.
#pragma once

#include <ATen/core/Tensor.h>

#include <pacer/modules/detail/fused_call.h>
#include <pacer/modules/layer_norm_mlp.h>

namespace pacer::detail {

// The projection before the network; there is none if `x` is undefined.
struct ProjectedBranch {
  at::Tensor x;  // [rows, any]
  const modules::LinearImpl* linear = nullptr;
  kernels::Dropout dropout;
};

// [rows, features], of the dtype of call.x() with the residual connection, else of the dtype of computing.
// `dropout`: of the network's result.
at::Tensor norm_mlp(const FusedCall& call, const modules::LayerNormMlpImpl& mlp,
                    const kernels::Dropout& dropout, const ProjectedBranch& branch);

}  // namespace pacer::detail
