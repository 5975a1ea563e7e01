#include <pacer/modules/detail/fp8_linear.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/linear.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <pacer/core/error.h>
#include <pacer/modules/fp8_scaling.h>

namespace pacer::detail {
namespace {

using torch::autograd::AutogradContext;

constexpr int64_t kMultiple = 16;  // of sizes

// a [m, k] times b [n, k] transposed, both row by row.
at::Tensor product(const at::Tensor& a, const at::Tensor& a_inverse, kernels::Fp8Format a_format,
                   const at::Tensor& b, const at::Tensor& b_inverse, at::ScalarType dtype,
                   const std::optional<at::Tensor>& bias, bool fast) {
  const at::ScalarType of_a = a_format == kernels::Fp8Format::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
  return at::_scaled_mm(a.view(of_a), b.view(at::kFloat8_e4m3fn).t(), a_inverse, b_inverse, bias,
                        /*scale_result=*/std::nullopt, dtype, fast);
}

// Of the result: autocast's where it is on, else that of x, which in 8 bits cannot be fp32.
at::ScalarType result_type(const at::Tensor& x) {
  const at::DeviceType device = x.device().type();
  if (at::autocast::is_autocast_enabled(device)) return at::autocast::get_autocast_dtype(device);
  return x.scalar_type() == at::kFloat ? at::kBFloat16 : x.scalar_type();
}

bool fits(const at::Tensor& x, const at::Tensor& weight) {
  const int64_t in = weight.size(1), rows = in == 0 ? 0 : x.numel() / in;
  return x.dim() > 0 && x.size(-1) == in && rows > 0 && rows % kMultiple == 0 && in % kMultiple == 0 &&
         weight.size(0) % kMultiple == 0;
}

bool is_castable(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
}

// The same dtype as in 8 bits, so that a model works with sizes of all kinds.
at::Tensor in_16_bits(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!is_castable(x) || !is_castable(weight)) return at::linear(x, weight, bias);
  const at::ScalarType dtype = result_type(x);
  return at::linear(x.to(dtype), weight.to(dtype), bias.defined() ? bias.to(dtype) : bias);
}

struct Fp8LinearNode : torch::autograd::Function<Fp8LinearNode> {
  static at::Tensor forward(AutogradContext* context, Fp8LayerPtr layer, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool records,
                            bool keeps_input) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::ScalarType dtype = result_type(x);
    const Fp8Matrix input = layer->cast_input(x.reshape({-1, x.size(-1)}), records, {keeps_input});
    const Fp8Matrix matrix = layer->cast_weight(weight);
    std::optional<at::Tensor> added;
    if (bias) added = bias->to(dtype);
    const at::Tensor y = product(input.codes, input.inverse, kernels::Fp8Format::e4m3, matrix.codes,
                                 matrix.inverse, dtype, added, /*fast=*/true);
    context->save_for_backward({input.transposed, input.inverse, weight});
    context->saved_data["layer"] = c10::IValue::make_capsule(std::move(layer));
    context->saved_data["records"] = records;
    context->saved_data["sizes"] = x.sizes().vec();
    context->saved_data["dtype"] = static_cast<int64_t>(x.scalar_type());
    context->saved_data["bias_dtype"] =
        static_cast<int64_t>(bias ? bias->scalar_type() : at::ScalarType::Undefined);
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    return y.view(sizes);
  }

  static std::vector<at::Tensor> backward(AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    require(!at::GradMode::is_enabled(),
            "a pacer::nn::Linear in 8-bit floats has no second derivative; leave its forward pass outside of "
            "Fp8Scope or Precision::fp8");
    const auto layer = c10::static_intrusive_pointer_cast<Fp8Layer>(context->saved_data["layer"].toCapsule());
    const auto saved = context->get_saved_variables();
    const at::Tensor &x_transposed = saved[0], &x_inverse = saved[1], &weight = saved[2];
    // Of the tensors among what forward was given.
    const bool needs_x = context->needs_input_grad(0), needs_weight = context->needs_input_grad(1);
    const auto bias_dtype = static_cast<at::ScalarType>(context->saved_data["bias_dtype"].toInt());
    const bool needs_bias = bias_dtype != at::ScalarType::Undefined && context->needs_input_grad(2);
    const at::Tensor dy = gradients[0].reshape({-1, weight.size(0)});
    at::Tensor dx, dweight, dbias;
    if (needs_x || needs_weight) {
      const bool records = context->saved_data["records"].toBool();
      const Fp8Matrix gradient = layer->cast_gradient(dy, records, {needs_weight, needs_bias});
      dbias = gradient.sums;
      if (needs_x) {
        const Fp8Matrix matrix = layer->cast_weight(weight);
        dx = product(gradient.codes, gradient.inverse, layer->gradients(), matrix.transposed, matrix.inverse,
                     static_cast<at::ScalarType>(context->saved_data["dtype"].toInt()), std::nullopt, false)
                 .view(context->saved_data["sizes"].toIntVector());
      }
      if (needs_weight) {
        dweight = product(gradient.transposed, gradient.inverse, layer->gradients(), x_transposed, x_inverse,
                          weight.scalar_type(), std::nullopt, false);
      }
    }
    if (needs_bias && !dbias.defined()) dbias = dy.sum(0, /*keepdim=*/false, at::kFloat);
    if (needs_bias) dbias = dbias.to(bias_dtype);
    return {at::Tensor(), dx, dweight, dbias, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

Fp8LayerPtr fp8_layer(const torch::nn::Module& module) {
  const auto& scaling = Fp8Scope::current();
  return scaling ? scaling->layer_of(module) : nullptr;
}

at::Tensor fp8_linear(const Fp8LayerPtr& layer, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias, bool records) {
  require(x.device() == layer->device() && weight.device() == layer->device(),
          "a pacer::nn::Linear in 8-bit floats has its scales on ", layer->device(), ", but its input is on ",
          x.device(), " and its weight on ", weight.device(),
          "; move the model before the Session or Fp8Scaling is made");
  if (!is_castable(x) || !is_castable(weight) || !fits(x, weight)) {
    layer->count_other_call();
    return in_16_bits(x, weight, bias);
  }
  const bool keeps_input = at::GradMode::is_enabled() && weight.requires_grad();
  std::optional<at::Tensor> added;
  if (bias.defined()) added = bias;
  return Fp8LinearNode::apply(layer, x, weight, added, records, keeps_input);
}

}  // namespace pacer::detail
