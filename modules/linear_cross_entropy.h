// The loss of a language model without its logits in memory: cross entropy behind the linear layer of the head.
//
//   const auto loss = pacer::modules::linear_cross_entropy(hidden, head->weight, targets);
//
// is torch::nn::functional::cross_entropy(head(hidden).flatten(0, 1).to(torch::kFloat), targets.flatten()), in chunks of
// rows: the logits of a chunk are made, become their own gradients, and are gone. The gradients of hidden and weight are
// there when forward ends; backward multiplies them with what comes from above.
#pragma once

#include <cstdint>
#include <optional>

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
  // Logits become cap * tanh(logits / cap) before the loss, as Gemma 2 has them; >= 0, 0: they do not.
  TORCH_ARG(double, soft_cap) = 0;
  // Bytes of logits at once, >= 1; a row at least, and a multiple of 128 rows where so many fit. Unset: 1,536 rows, or 128 MiB
  // where that is more. Chunks that are too small make products slow, and the sum over them of the weight's gradient, which is
  // fp32.
  TORCH_ARG(std::optional<int64_t>, chunk_bytes);
  // The two products with the weight are of 8-bit floats: logits of e4m3, scaled by the largest magnitude of hidden and weight,
  // and the gradient of hidden of e5m2. That of the weight stays in 16 bits. Logits are then off by some hundredths. For
  // computing in 16 bits, sides of the weight that are multiples of 16, and GPUs of compute capability 8.9 or later.
  TORCH_ARG(bool, fp8) = false;
};

// hidden [..., in], weight [columns, in], a head's or that of an embedding it is tied to, and targets [...] in Long -> the loss,
// fp32 []. It computes in the dtype of autocast, else in that of hidden: Float, BFloat16 or Half; logits are rounded to it,
// as without this function, everything behind them is fp32. Without a row that counts it is NaN. No second derivative.
// `row_weights` [...] in Float, without a gradient: the loss is the mean of those of rows with these weights; undefined: of all
// rows that count alike.
//
// Throws InvalidArgument for other shapes, dtypes and devices, and on a CPU for a target that is neither a column nor
// ignored; on a GPU, which is not waited for, such a row makes the loss NaN.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {},
                                const at::Tensor& row_weights = {});

}  // namespace pacer::modules
