#include <pacer/modules/detail/fused_call.h>

#include <algorithm>

#include <ATen/autocast_mode.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/draw_dropout.h>

namespace pacer::detail {
namespace {

// As autocast does it, whose casts of a parameter are shared by all that use it in a pass.
at::Tensor as_computed(const at::Tensor& parameter, at::ScalarType dtype) {
  if (!parameter.defined() || parameter.scalar_type() == dtype) return parameter;
  const at::DeviceType device = parameter.device().type();
  return at::autocast::is_autocast_enabled(device) ? at::autocast::cached_cast(dtype, parameter, device)
                                                   : parameter.to(dtype);
}

}  // namespace

FusedCall::FusedCall(const char* layer, const at::Tensor& x, int64_t features,
                     const std::vector<const modules::LinearImpl*>& linears, bool is_training)
    : layer_(layer), is_training_(is_training) {
  require(x.dim() >= 1 && x.size(-1) == features, layer, " takes [..., ", features, "], not ", x.sizes());
  require(is_castable(x), layer, " computes in Float, BFloat16 and Half, not in ", x.scalar_type(),
          "; cast its input and parameters");
  for (const modules::LinearImpl* linear : linears) {
    const at::Tensor& weight = linear->nf4().is_empty() ? linear->weight : linear->nf4()->codes;
    require(weight.device() == x.device(), layer, " has its parameters on ", weight.device(),
            ", but its input is on ", x.device(), "; move one of them");
  }
  const bool in_8_bits = std::any_of(linears.begin(), linears.end(),
                                     [](const auto* linear) { return fp8_layer(*linear) != nullptr; });
  dtype_ = computing_type(x, in_8_bits);
  require(is_castable(dtype_), layer, " computes in Float, BFloat16 and Half, not in ", dtype_,
          "; give autocast another dtype");
  // A residual stream of 32 bits stays; one of 16 bits is of the dtype of computing.
  x_ = as_rows(x.scalar_type() == at::kFloat ? x : x.to(dtype_));
}

LinearInputs FusedCall::inputs_of(const modules::LinearImpl& linear) const {
  Fp8LayerPtr fp8 = fp8_layer(linear);
  if (fp8 && !multiplies(*fp8, x_, x_.size(0), linear.weight)) fp8 = nullptr;
  at::Tensor weight = fp8 ? linear.weight : as_computed(linear.weight, dtype_);
  return {std::move(fp8), std::move(weight), as_computed(linear.bias, dtype_)};
}

Norm FusedCall::inputs_of(const torch::nn::LayerNormImpl& norm) const {
  return checked({Normalization::layer, norm.weight, norm.bias, norm.options.eps()}, x_.size(1));
}

Norm FusedCall::inputs_of(const modules::RmsNormImpl& norm, int64_t features) const {
  return checked({Normalization::rms, norm.weight, {}, norm.options.eps()}, features);
}

Norm FusedCall::checked(Norm norm, int64_t features) const {
  const auto fits = [&](const at::Tensor& parameter) {
    return parameter.defined() && parameter.numel() == features && parameter.device() == x_.device();
  };
  require(fits(norm.weight) && (!norm.bias.defined() || fits(norm.bias)), layer_,
          " needs a norm with a weight of ", features, " elements, and a bias of as many or none, on ",
          x_.device(), "; leave the norm that it was made with");
  return norm;
}

kernels::Dropout FusedCall::dropout(double p) const {
  require(p >= 0 && p < 1, "a probability of dropout of ", layer_, " is ", p, ", but must be in [0, 1)");
  return draw_dropout(is_training_ ? p : 0, x_.device());
}

}  // namespace pacer::detail
