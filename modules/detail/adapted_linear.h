// Linear layers over one input with low-rank adapters, weights in 4 bits, or both, as one node of the graph.
// The low rank goes first: its product is what the large product adds to (beta = 1), so that the adapter
// costs no pass over the result of its own. Weights in 4 bits are decoded into a buffer that lives as long as
// the product, forward and again backward.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/kernels/math/dropout.h>
#include <pacer/modules/lora_adapter.h>
#include <pacer/modules/nf4_weight.h>

namespace pacer::detail {

// One of the layers.
struct AdaptedLayer {
  at::Tensor weight;  // [out, in]; undefined: `nf4`, or no product with a weight at all where that is null
  modules::Nf4Weight nf4 = nullptr;
  at::Tensor bias;  // [out] or undefined
  at::Tensor A, B;  // [r, in], [out, r]; undefined: no adapter
  double scale = 1;
};

// x [..., in], in `dtype` after a cast -> one [..., out] per layer: x W^T + bias + scale * drop(x) A^T B^T,
// products in `dtype`.
std::vector<at::Tensor> adapted_linears(const at::Tensor& x, at::ScalarType dtype,
                                        const std::vector<AdaptedLayer>& layers,
                                        const kernels::Dropout& dropout);

}  // namespace pacer::detail
