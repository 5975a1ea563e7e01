// Nodes of LibTorch's products in which nearly all of the work for weights is, and that do it separately:
// each operand's gradient is a product or convolution of its own, which is left out where nobody asks for it.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace pacer::detail {

bool is_product(const torch::autograd::Node& node);

// Frees the operand that the node needs for none of its edges any more, for example a weight that autocast
// has cast for it. Convolutions have none.
void release_unused_operands(torch::autograd::Node& product);

}  // namespace pacer::detail
