#include <pacer/modules/linear.h>

#include <cmath>
#include <ostream>

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/nn/init.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/fp8_linear.h>
#include <pacer/modules/detail/product.h>

namespace pacer::nn {

LinearImpl::LinearImpl(const torch::nn::LinearOptions& linear_options) : options(linear_options) {
  require(options.in_features() >= 0 && options.out_features() >= 0,
          "pacer::nn::Linear needs numbers of features that are not negative, not ", options.in_features(),
          " and ", options.out_features());
  LinearImpl::reset();
}

void LinearImpl::reset() {
  weight = register_parameter("weight", at::empty({options.out_features(), options.in_features()}));
  bias = options.bias() ? register_parameter("bias", at::empty({options.out_features()}))
                        : register_parameter("bias", at::Tensor(), /*requires_grad=*/false);
  reset_parameters();
}

void LinearImpl::reset_parameters() {
  if (weight.numel() > 0) torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0));
  if (!bias.defined()) return;
  const double bound = options.in_features() > 0 ? 1 / std::sqrt(double(options.in_features())) : 0;
  torch::nn::init::uniform_(bias, -bound, bound);
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "pacer::nn::Linear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << std::boolalpha << options.bias()
         << ")";
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  if (const auto layer = detail::fp8_layer(*this)) {
    return detail::fp8_linear(layer, x, weight, bias, /*records=*/is_training());
  }
  return at::linear(x, weight, bias);
}

}  // namespace pacer::nn
