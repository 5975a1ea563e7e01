// The forward pass of layers over one input of which any has an adapter or a weight in 4 bits.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/modules/linear.h>

namespace pacer::detail {

// Whether an adapter takes part in what the layer computes, or its weight is in 4 bits.
bool is_adapted(const modules::LinearImpl& layer);

// One result per layer. InvalidArgument for another number of features, and for adapters that do not agree on
// dropout.
std::vector<at::Tensor> adapted_forward(const at::Tensor& x,
                                        const std::vector<const modules::LinearImpl*>& layers);

}  // namespace pacer::detail
