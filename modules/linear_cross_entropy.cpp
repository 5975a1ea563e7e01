#include <pacer/modules/linear_cross_entropy.h>

#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <pacer/modules/detail/head_loss.h>
#include <pacer/modules/detail/product.h>

namespace pacer::modules {
namespace {

using Options = LinearCrossEntropyOptions;

// `logits` become their gradients, and `codes`, where they are defined, the same in e5m2.
void make_losses(const at::Tensor& logits, const detail::LossRows& rows, const Options& options,
                 bool wants_gradient, const at::Tensor& losses, const at::Tensor& codes) {
  kernels::CrossEntropy work = detail::cross_entropy_of(logits, rows, options);
  work.wants_gradient = wants_gradient;
  work.losses = losses.mutable_data_ptr<float>();
  if (codes.defined()) work.codes = codes.mutable_data_ptr<uint8_t>();
  detail::run_cross_entropy(work, logits.device());
}

struct LinearCrossEntropyNode : torch::autograd::Function<LinearCrossEntropyNode> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  static at::Tensor forward(Context* context, const at::Tensor& hidden, const at::Tensor& weight,
                            const detail::LossRows& rows, const Options& options, bool for_hidden,
                            bool for_weight) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto make = [&](const at::Tensor& logits, const detail::LossRows& of_chunk,
                          const at::Tensor& losses, const at::Tensor& codes) {
      make_losses(logits, of_chunk, options, for_hidden || for_weight, losses, codes);
    };
    detail::LossSum sum =
        detail::loss_sum(hidden, weight, rows, options, weight.size(0), for_hidden, for_weight, make);
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
