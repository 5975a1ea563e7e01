// A normalisation of rows alone as one node of the graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <pacer/modules/detail/fused_call.h>

namespace pacer::detail {

// [rows, features], of the dtype of computing.
at::Tensor norm_rows(const FusedCall& call, const Norm& norm);

}  // namespace pacer::detail
