#include <pacer/modules/layer_norm_mlp.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/norm_mlp.h>
#include <pacer/modules/detail/register_norm.h>
#include <pacer/modules/detail/replay_memory.h>

namespace pacer::modules {

LayerNormMlpImpl::LayerNormMlpImpl(const LayerNormMlpOptions& layer_options) : options(layer_options) {
  require(options.features() > 0 && options.ffn() > 0, "LayerNormMlp needs numbers of features above 0, not ",
          options.features(), " and ", options.ffn());
  require(options.dropout() >= 0 && options.dropout() < 1,
          "LayerNormMlpOptions::dropout must be in [0, 1), not ", options.dropout());
  LayerNormMlpImpl::reset();
}

void LayerNormMlpImpl::reset() {
  const int64_t features = options.features(), ffn = options.ffn();
  detail::register_norm(*this, features);
  const auto linear = [&](int64_t in, int64_t out) {
    return Linear(torch::nn::LinearOptions(in, out).bias(options.bias()));
  };
  fc1 = register_module("fc1", linear(features, ffn * kernels::activation_inputs(options.activation())));
  fc2 = register_module("fc2", linear(ffn, features));
}

at::Tensor LayerNormMlpImpl::forward(const at::Tensor& x) {
  const detail::FusedCall call("LayerNormMlp", x, options.features(), {fc1.get(), fc2.get()}, is_training());
  const at::Tensor y = detail::norm_mlp(call, *this, call.dropout(options.dropout()), {}).view(x.sizes());
  detail::ReplayMemory::note_result(y);
  return y;
}

}  // namespace pacer::modules
