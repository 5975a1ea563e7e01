#include <pacer/modules/linear_cross_entropy.h>

#include <algorithm>
#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <pacer/modules/detail/head_loss.h>
#include <pacer/modules/detail/head_products.h>
#include <pacer/modules/detail/product.h>

namespace pacer::modules {
namespace {

using Options = LinearCrossEntropyOptions;

// Of all rows: the sum of their losses, and its gradients, where they are wanted.
struct LossSum {
  at::Tensor losses;  // fp32 [rows]
  at::Tensor hidden;  // [rows, in], of the dtype of computing
  at::Tensor weight;  // [columns, in], fp32 where several chunks of 16 bits were added up
};

// `logits` become their gradients, and `codes`, where they are defined, the same in e5m2.
void make_losses(const at::Tensor& logits, const detail::LossRows& rows, const Options& options,
                 bool wants_gradient, const at::Tensor& losses, const at::Tensor& codes) {
  kernels::CrossEntropy work = detail::cross_entropy_of(logits, rows, options);
  work.wants_gradient = wants_gradient;
  work.losses = losses.mutable_data_ptr<float>();
  if (codes.defined()) work.codes = codes.mutable_data_ptr<uint8_t>();
  detail::run_cross_entropy(work, logits.device());
}

LossSum loss_sum(const at::Tensor& hidden, const at::Tensor& weight, const detail::LossRows& of_rows,
                 const Options& options, bool for_hidden, bool for_weight) {
  const int64_t rows = hidden.size(0), columns = weight.size(0);
  const int64_t chunk_rows =
      detail::rows_of_chunk(columns * static_cast<int64_t>(hidden.element_size()), options);
  const detail::HeadProducts products(hidden, weight, options.fp8() && rows > 0, for_hidden);
  LossSum sum;
  sum.losses = at::empty({rows}, hidden.options().dtype(at::kFloat));
  if (for_hidden) sum.hidden = at::empty_like(hidden);
  if (for_weight && rows == 0) sum.weight = at::zeros(weight.sizes(), weight.options());
  for (int64_t first = 0; first < rows; first += chunk_rows) {
    const int64_t count = std::min(chunk_rows, rows - first);
    const detail::LossRows of_chunk = of_rows.narrow(first, count);
    const at::Tensor logits = products.logits(first, count);
    at::Tensor codes;
    if (for_hidden && products.are_in_8_bits()) codes = at::empty_like(logits, at::kByte);
    make_losses(logits, of_chunk, options, for_hidden || for_weight, sum.losses.narrow(0, first, count),
                codes);
    if (for_hidden) {
      const at::Tensor gradient = sum.hidden.narrow(0, first, count);
      products.write_hidden_gradient(logits, codes, gradient);
      if (codes.defined() && of_chunk.weights.defined()) gradient.mul_(of_chunk.weights.unsqueeze(1));
    }
    if (for_weight) products.add_weight_gradient(logits, first, sum.weight);
  }
  return sum;
}

struct LinearCrossEntropyNode : torch::autograd::Function<LinearCrossEntropyNode> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  static at::Tensor forward(Context* context, const at::Tensor& hidden, const at::Tensor& weight,
                            const detail::LossRows& rows, const Options& options, bool for_hidden,
                            bool for_weight) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    LossSum sum = loss_sum(hidden, weight, rows, options, for_hidden, for_weight);
    const at::Tensor counted = rows.count(options.ignore_index());
    // Gradients of nothing are zero.
    const at::Tensor divisor = counted + counted.eq(0);
    context->save_for_backward({std::move(sum.hidden), std::move(sum.weight), divisor});
    context->saved_data["dtype"] = static_cast<int64_t>(weight.scalar_type());
    return sum.losses.sum() / counted;
  }

  // What was made in forward is that of the sum of the losses: with 1 / count, small numbers would leave the range of fp16.
  static Tensors backward(Context* context, const Tensors& gradients) {
    detail::refuse_second_derivative();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensors kept = context->get_saved_variables();
    const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    // A vector, so that 16-bit tensors are multiplied with it in fp32.
    const at::Tensor factor = (gradients[0] / kept[2]).reshape({1});
    at::Tensor of_hidden = detail::scaled_gradient(kept[0], factor, dtype);
    at::Tensor of_weight = detail::scaled_gradient(kept[1], factor, dtype);
    return {std::move(of_hidden), std::move(of_weight), {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                                const Options& options, const at::Tensor& row_weights) {
  const detail::LossInput input =
      detail::checked_loss_input(hidden, weight, weight, targets, options, row_weights);
  const bool records = at::GradMode::is_enabled();
  return LinearCrossEntropyNode::apply(input.hidden, input.columns, input.rows, options,
                                       records && input.hidden.requires_grad(),
                                       records && input.columns.requires_grad());
}

}  // namespace pacer::modules
