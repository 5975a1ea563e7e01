// LibTorch's attention, also of keys and values that several queries share.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

// q [batch, heads, sequence, channels], k and v with as many heads or a divisor of these, of which each serves
// neighbouring ones of q (Ainslie et al., arXiv:2305.13245); as scaled_dot_product_attention otherwise.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask, double dropout, bool is_causal);

}  // namespace pacer::detail
