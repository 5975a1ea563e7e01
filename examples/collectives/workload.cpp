// Shapes follow transformers: matrices hold nearly all elements, and there are as many biases as matrices.
#include "workload.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/custom_function.h>

#include <pacer/core/error.h>

namespace collectives {
namespace {

// The identity, which takes `seconds` forward and twice that backward.
struct Pause : torch::autograd::Function<Pause> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double seconds) {
    context->saved_data["seconds"] = seconds;
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    std::this_thread::sleep_for(std::chrono::duration<double>(2 * context->saved_data["seconds"].toDouble()));
    return {gradients[0], at::Tensor()};
  }
};

}  // namespace

std::vector<int64_t> tensor_lengths(const ExchangeSize& size) {
  pacer::require(size.tensors >= 2 && size.tensors % 2 == 0 && size.elements >= size.tensors,
                 "an exchange needs an even number of tensors and an element for each, not ", size.elements,
                 " in ", size.tensors);
  constexpr int64_t kMatrixPerBias = 256;
  const int64_t pairs = size.tensors / 2, pair = size.elements / pairs;
  const int64_t bias = std::max<int64_t>(1, pair / (kMatrixPerBias + 1));
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t rest = i == 0 ? size.elements - pairs * pair : 0;
    lengths.push_back(pair - bias + rest);
    lengths.push_back(bias);
  }
  return lengths;
}

Gradients::Gradients(const std::shared_ptr<pacer::Communicator>& world, const ExchangeSize& size) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const int64_t length : tensor_lengths(size)) {
    const auto options = at::TensorOptions(at::kFloat).device(world->device());
    plain_.push_back(at::ones({length}, options));
    parameters_.push_back(at::ones({length}, options).requires_grad_());
    parameters_.back().mutable_grad() = at::ones({length}, options);
    named.emplace_back(std::to_string(named.size()), parameters_.back());
  }
  bucketer_ = std::make_unique<pacer::GradientBucketer>(named, world);
}

void Gradients::reset() {
  for (const at::Tensor& gradient : plain_) gradient.fill_(1);
  for (const at::Tensor& gradient : bucketed()) gradient.fill_(1);
}

std::vector<at::Tensor> Gradients::bucketed() const {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
  return gradients;
}

ResidualMlpImpl::ResidualMlpImpl(int64_t layers, int64_t width, double layer_seconds)
    : layer_seconds_(layer_seconds) {
  for (int64_t i = 0; i < layers; ++i) {
    const std::string number = std::to_string(i);
    norms_.push_back(register_module("norm" + number, torch::nn::LayerNorm(std::vector<int64_t>{width})));
    inputs_.push_back(register_module("input" + number, torch::nn::Linear(width, 4 * width)));
    outputs_.push_back(register_module("output" + number, torch::nn::Linear(4 * width, width)));
  }
}

at::Tensor ResidualMlpImpl::loss(const at::Tensor& x) {
  at::Tensor h = x;
  for (size_t i = 0; i < norms_.size(); ++i) {
    h = h + outputs_[i](at::gelu(inputs_[i](norms_[i](h))));
    if (layer_seconds_ > 0)
      h = Pause::apply(h, layer_seconds_);  // before this layer's gradients, in backward
  }
  return h.square().mean();
}

int64_t ResidualMlpImpl::elements() const {
  int64_t sum = 0;
  for (const at::Tensor& parameter : parameters()) sum += parameter.numel();
  return sum;
}

std::vector<std::pair<std::string, at::Tensor>> ResidualMlpImpl::named() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : named_parameters()) all.emplace_back(item.key(), item.value());
  return all;
}

std::vector<at::Tensor> ResidualMlpImpl::gradients() const {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : parameters()) all.push_back(parameter.grad());
  return all;
}

}  // namespace collectives
