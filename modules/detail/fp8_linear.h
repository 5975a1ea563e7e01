// A linear layer in 8-bit floats as a node of the graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <pacer/modules/detail/fp8_layer.h>

namespace pacer::detail {

// x [..., in], weight [out, in], bias [out] or undefined -> [..., out]. Where the sizes are no multiples of
// 16 it is at::linear, and counted. `records`: largest magnitudes count for the scales to come.
at::Tensor fp8_linear(const Fp8LayerPtr& layer, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias, bool records);
// The same over a weight in 4 bits, frozen, which is decoded in forward and again in backward. Undefined
// where the sizes are no multiples of 16, which is counted.
at::Tensor fp8_linear(const Fp8LayerPtr& layer, const at::Tensor& x, const modules::Nf4Weight& weight,
                      const at::Tensor& bias, bool records);

}  // namespace pacer::detail
