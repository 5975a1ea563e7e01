// The loss of a language model without its logits in memory: cross entropy behind the linear layer of the head.
//
//   const auto loss = pacer::modules::linear_cross_entropy(hidden, head->weight, targets);
//
// is torch::nn::functional::cross_entropy(head(hidden).flatten(0, 1).to(torch::kFloat), targets.flatten()), in chunks of
// rows: the logits of a chunk are made, become their own gradients, and are gone. The gradients of hidden and weight are
// there when forward ends; backward multiplies them with what comes from above.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

namespace pacer::modules {

struct LinearCrossEntropyOptions {
  LinearCrossEntropyOptions() = default;
  // Rows with this target count for nothing; the loss is the mean over the others.
  TORCH_ARG(int64_t, ignore_index) = -100;
  // What of each target is spread over all columns, in [0, 1).
  TORCH_ARG(double, label_smoothing) = 0;
  // Times the square of each row's log(sum(exp(logits))) that is added to its loss, >= 0 (arXiv:2204.02311).
  TORCH_ARG(double, z_loss) = 0;
  // Bytes of logits at once, >= 1; a row at least. Chunks that are too small make products slow, and the sum over them of the
  // weight's gradient, which is fp32.
  TORCH_ARG(int64_t, chunk_bytes) = int64_t{128} << 20;
};

// hidden [..., in], weight [columns, in], a head's or that of an embedding it is tied to, and targets [...] in Long -> the loss,
// fp32 []. It computes in the dtype of autocast, else in that of hidden: Float, BFloat16 or Half; logits are rounded to it,
// as without this function, everything behind them is fp32. Without a row that counts it is NaN. No second derivative.
//
// Throws InvalidArgument for other shapes, dtypes and devices, and on a CPU for a target that is neither a column nor
// ignored; on a GPU, which is not waited for, such a row makes the loss NaN.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace pacer::modules
