// The loss behind a head whose weight ranks share out by its rows, as `linear_cross_entropy` makes it of a whole one. Each rank
// makes the logits of its columns for the rows of all ranks; what travels are hidden states and their gradients, and four
// numbers a row and rank (as for tensor parallelism in Shoeybi et al., arXiv:1909.08053, section 3).
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include <pacer/modules/head_exchange.h>
#include <pacer/modules/linear_cross_entropy.h>

namespace pacer::detail {

// It is linear_cross_entropy over ranks; see WithHead::head_loss for what they do alike. `weight`: the parameter, whose
// values may not be here.
at::Tensor split_head_loss(const std::shared_ptr<modules::HeadExchange>& exchange, const at::Tensor& hidden,
                           const at::Tensor& weight, const at::Tensor& targets,
                           const modules::LinearCrossEntropyOptions& options, const at::Tensor& row_weights);

}  // namespace pacer::detail
