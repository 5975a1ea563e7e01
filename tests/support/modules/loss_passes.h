// A loss behind a head, with its gradients, by linear_cross_entropy and as a program without it makes it.
#pragma once

#include <algorithm>

#include <torch/nn/functional/loss.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/modules/linear_cross_entropy.h>

namespace pacer::testing {

using modules::LinearCrossEntropyOptions;

struct LossCase {
  torch::Tensor hidden, weight, targets;  // of any dtype, without gradients
  LinearCrossEntropyOptions options = {};
  torch::Tensor row_weights = {};

  LossCase to(at::Device device, at::ScalarType dtype) const {
    return {hidden.to(device, dtype), weight.to(device, dtype), targets.to(device), options,
            row_weights.defined() ? row_weights.to(device) : row_weights};
  }
};

// Rows [3, rows / 3] of which some are ignored, with logits of a size that training has.
inline LossCase loss_case(int64_t rows = 30, int64_t columns = 41, int64_t in = 16,
                          const LinearCrossEntropyOptions& options = {}) {
  torch::manual_seed(4);
  LossCase made{torch::randn({3, rows / 3, in}), torch::randn({columns, in}),
                torch::randint(columns, {3, rows / 3}), options};
  made.targets.select(0, 1).narrow(0, 0, 2).fill_(options.ignore_index());
  return made;
}

struct LossPass {
  torch::Tensor loss, hidden, weight;  // the loss and the gradients
};

template <class Loss>
LossPass loss_pass(const LossCase& of, const Loss& loss, double scale = 1) {
  const torch::Tensor hidden = of.hidden.detach().clone().requires_grad_();
  const torch::Tensor weight = of.weight.detach().clone().requires_grad_();
  const torch::Tensor result = loss(hidden, weight, of.targets, of.options, of.row_weights);
  (result * scale).backward();
  return {result.detach(), hidden.grad(), weight.grad()};
}

// With logits in memory. `wide`: of what comes behind them.
inline torch::Tensor plain_loss(const torch::Tensor& hidden, const torch::Tensor& weight,
                                const torch::Tensor& targets, const LinearCrossEntropyOptions& options,
                                const torch::Tensor& row_weights, at::ScalarType wide) {
  torch::Tensor logits = at::linear(hidden, weight).flatten(0, -2).to(wide);
  if (options.soft_cap() > 0) logits = options.soft_cap() * (logits / options.soft_cap()).tanh();
  torch::Tensor losses = torch::nn::functional::cross_entropy(logits, targets.flatten(),
                                                              torch::nn::functional::CrossEntropyFuncOptions()
                                                                  .ignore_index(options.ignore_index())
                                                                  .label_smoothing(options.label_smoothing())
                                                                  .reduction(torch::kNone));
  torch::Tensor counts = targets.flatten().ne(options.ignore_index());
  if (options.z_loss() != 0)
    losses = losses + options.z_loss() * torch::logsumexp(logits, 1).square() * counts;
  if (row_weights.defined()) counts = counts * row_weights.flatten();
  if (row_weights.defined()) losses = losses * row_weights.flatten();
  return losses.sum() / counts.sum();
}
inline LossPass plain_pass(const LossCase& of, at::ScalarType wide = at::kFloat, double scale = 1) {
  return loss_pass(
      of, [&](const auto&... given) { return plain_loss(given..., wide); }, scale);
}
inline LossPass fused_loss_pass(const LossCase& of, double scale = 1) {
  return loss_pass(
      of, [](const auto&... given) { return modules::linear_cross_entropy(given...); }, scale);
}

// |found - exact| / |exact|, the largest of loss and gradients.
inline double loss_error(const LossPass& found, const LossPass& exact) {
  const auto error = [](const torch::Tensor& a, const torch::Tensor& b) {
    const torch::Tensor reference = b.to(at::kDouble).cpu();
    return ((a.to(at::kDouble).cpu() - reference).norm() / reference.norm()).item<double>();
  };
  return std::max(
      {error(found.loss, exact.loss), error(found.hidden, exact.hidden), error(found.weight, exact.weight)});
}

}  // namespace pacer::testing
