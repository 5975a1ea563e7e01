#include <pacer/modules/layer_norm_linear.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/fused_call.h>
#include <pacer/modules/detail/norm_linear.h>
#include <pacer/modules/detail/register_norm.h>

namespace pacer::modules {

LayerNormLinearImpl::LayerNormLinearImpl(const LayerNormLinearOptions& layer_options)
    : options(layer_options) {
  require(options.in_features() > 0 && options.out_features() > 0,
          "LayerNormLinear needs numbers of features above 0, not ", options.in_features(), " and ",
          options.out_features());
  LayerNormLinearImpl::reset();
}

void LayerNormLinearImpl::reset() {
  detail::register_norm(*this, options.in_features());
  linear = register_module(
      "linear",
      Linear(torch::nn::LinearOptions(options.in_features(), options.out_features()).bias(options.bias())));
}

at::Tensor LayerNormLinearImpl::forward(const at::Tensor& x) {
  const detail::FusedCall call("LayerNormLinear", x, options.in_features(), {linear.get()}, is_training());
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = options.out_features();
  return detail::norm_linear(call, call.norm_of(*this), *linear).y.front().view(sizes);
}

}  // namespace pacer::modules
