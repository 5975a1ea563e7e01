#include <pacer/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <ostream>

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/nn/init.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/adapted_forward.h>
#include <pacer/modules/detail/fp8_linear.h>
#include <pacer/modules/detail/product.h>

namespace pacer::modules {

LinearImpl::LinearImpl(const torch::nn::LinearOptions& linear_options) : options(linear_options) {
  require(options.in_features() >= 0 && options.out_features() >= 0,
          "pacer::modules::Linear needs numbers of features that are not negative, not ",
          options.in_features(), " and ", options.out_features());
  LinearImpl::reset();
}

// Also what a clone is filled after, so it makes what this layer has become.
void LinearImpl::reset() {
  const bool is_frozen = weight.defined() && !weight.requires_grad();
  const bool bias_is_frozen = bias.defined() && !bias.requires_grad();
  if (nf4_) {
    nf4_ = register_module("weight", std::dynamic_pointer_cast<Nf4WeightImpl>(nf4_->clone()));
  } else {
    weight =
        register_parameter("weight", at::empty({options.out_features(), options.in_features()}), !is_frozen);
  }
  bias = options.bias() ? register_parameter("bias", at::empty({options.out_features()}), !bias_is_frozen)
                        : register_parameter("bias", at::Tensor(), /*requires_grad=*/false);
  reset_parameters();
  renew_adapters();
}

void LinearImpl::reset_parameters() {
  if (weight.defined() && weight.numel() > 0) torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0));
  if (!bias.defined()) return;
  const double bound = options.in_features() > 0 ? 1 / std::sqrt(double(options.in_features())) : 0;
  torch::nn::init::uniform_(bias, -bound, bound);
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "pacer::modules::Linear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << std::boolalpha << options.bias()
         << ")";
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  if (!is_plain()) return detail::adapted_forward(x, {this}).front();
  if (const auto layer = detail::fp8_layer(*this)) {
    return detail::fp8_linear(layer, x, weight, bias, detail::pass_records(is_training()));
  }
  return at::linear(x, weight, bias);
}

std::vector<at::Tensor> forward_together(const at::Tensor& x, const std::vector<Linear>& layers) {
  std::vector<LinearImpl*> all;
  for (const Linear& layer : layers) all.push_back(layer.ptr().get());
  const bool is_plain =
      std::all_of(all.begin(), all.end(), [](const LinearImpl* layer) { return layer->is_plain(); });
  if (!is_plain) return detail::adapted_forward(x, {all.begin(), all.end()});
  std::vector<at::Tensor> results;
  for (LinearImpl* layer : all) results.push_back(layer->forward(x));
  return results;
}

}  // namespace pacer::modules
