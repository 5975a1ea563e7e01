#include "teaching.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>

namespace convergence {

void SignedGradients::attach(pacer::SessionParts& parts) {
  int64_t elements = 0;
  for (const auto& group : parts.optimizer().param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      parameters_.push_back(parameter);
      elements += parameter.numel();
    }
  }
  signs_ = std::make_unique<pacer::CompressedAllReduce>(
      pacer::Communicator::alone(parameters_.front().device()), elements,
      pacer::CompressionOptions().compress_alone(true));
}

// Gradients are the mean over ranks already, so that every rank rounds the same numbers.
void SignedGradients::gradients_ready(const pacer::Progress& /*progress*/) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : parameters_) flat.push_back(parameter.grad().reshape({-1}));
  const at::Tensor all = at::cat(flat);
  signs_->reduce(all);
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters_) {
    parameter.grad().copy_(all.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
    offset += parameter.numel();
  }
}

void SignedGradients::save(pacer::NamedTensors& state) const {
  state["worker_error"] = signs_->worker_error();
  state["server_error"] = signs_->server_error();
}
void SignedGradients::load(const pacer::NamedTensors& state) {
  signs_->set_errors(pacer::require_tensor(state, "worker_error"),
                     pacer::require_tensor(state, "server_error"));
}

void ForgottenErrors::after_step(pacer::StepReport& /*report*/) {
  pacer::SessionOptimizer* optimizer = parts_->session_optimizer();
  pacer::NamedTensors errors = optimizer->export_rank_state();
  for (auto& [name, tensor] : errors) {
    if (tensor.is_floating_point()) tensor = at::zeros_like(tensor);
  }
  if (!errors.empty()) optimizer->import_states(optimizer->export_state(), errors);
}

void LargestUpdate::gradients_ready(const pacer::Progress& /*progress*/) {
  const at::NoGradGuard no_grad;
  before_.clear();
  for (const auto& group : parts_->optimizer().param_groups()) {
    for (const at::Tensor& parameter : group.params()) before_.push_back(parameter.clone());
  }
}

void LargestUpdate::after_step(pacer::StepReport& /*report*/) {
  const at::NoGradGuard no_grad;
  size_t i = 0;
  for (const auto& group : parts_->optimizer().param_groups()) {
    const double rate = group.options().get_lr();
    for (const at::Tensor& parameter : group.params()) {
      const double moved = parameter.sub(before_[i++]).abs().max().item<double>();
      if (rate > 0) *largest_ = std::max(*largest_, moved / rate);
    }
  }
}

}  // namespace convergence
