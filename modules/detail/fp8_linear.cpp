#include <pacer/modules/detail/fp8_linear.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/product.h>

namespace pacer::detail {
namespace {

using torch::autograd::AutogradContext;

// The same dtype as in 8 bits, so that a model works with sizes of all kinds.
at::Tensor in_16_bits(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!is_castable(x) || !is_castable(weight)) return at::linear(x, weight, bias);
  const at::ScalarType dtype = computing_type(x, /*in_8_bits=*/true);
  return at::linear(x.to(dtype), weight.to(dtype), bias.defined() ? bias.to(dtype) : bias);
}

// A weight in 4 bits between forward and backward.
struct KeptNf4 : torch::CustomClassHolder {
  explicit KeptNf4(modules::Nf4Weight kept) : weight(std::move(kept)) {}
  modules::Nf4Weight weight;
};

struct Fp8LinearNode : torch::autograd::Function<Fp8LinearNode> {
  static at::Tensor forward(AutogradContext* context, Fp8LayerPtr layer, const at::Tensor& x,
                            const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                            modules::Nf4Weight nf4, bool records, bool keeps_input) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::Tensor kept_weight = weight.value_or(at::Tensor());
    const Product product(layer, kept_weight, computing_type(x, /*in_8_bits=*/true), records, nf4);
    Operand input;
    static_cast<Fp8Matrix&>(input) =
        layer->tensors().cast(as_rows(x), layer->input(records), {/*transposed=*/keeps_input});
    const at::Tensor y = product.forward(input, bias ? bias->to(product.dtype()) : at::Tensor());
    context->save_for_backward({input.transposed, input.inverse, kept_weight});
    context->saved_data["nf4"] = c10::IValue::make_capsule(c10::make_intrusive<KeptNf4>(std::move(nf4)));
    context->saved_data["layer"] = c10::IValue::make_capsule(std::move(layer));
    context->saved_data["records"] = records;
    context->saved_data["sizes"] = x.sizes().vec();
    context->saved_data["dtype"] = static_cast<int64_t>(x.scalar_type());
    context->saved_data["bias_dtype"] =
        static_cast<int64_t>(bias ? bias->scalar_type() : at::ScalarType::Undefined);
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = y.size(1);
    return y.view(sizes);
  }

  static std::vector<at::Tensor> backward(AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    refuse_second_derivative();
    const auto layer = c10::static_intrusive_pointer_cast<Fp8Layer>(context->saved_data["layer"].toCapsule());
    const auto saved = context->get_saved_variables();
    const at::Tensor& weight = saved[2];
    const auto nf4 = c10::static_intrusive_pointer_cast<KeptNf4>(context->saved_data["nf4"].toCapsule());
    Operand input;
    input.transposed = saved[0];
    input.inverse = saved[1];
    // Of the tensors among what forward was given; a weight in 4 bits is none.
    const bool has_weight = weight.defined();
    const bool needs_x = context->needs_input_grad(0);
    const bool needs_weight = has_weight && context->needs_input_grad(1);
    const auto bias_dtype = static_cast<at::ScalarType>(context->saved_data["bias_dtype"].toInt());
    const bool needs_bias =
        bias_dtype != at::ScalarType::Undefined && context->needs_input_grad(has_weight ? 2 : 1);
    const auto x_dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    const at::Tensor dy = as_rows(gradients[0]);
    at::Tensor dx, dweight, dbias;
    if (needs_x || needs_weight) {
      const bool records = context->saved_data["records"].toBool();
      const Product product(layer, weight, x_dtype, records, nf4->weight);
      Operand gradient;
      static_cast<Fp8Matrix&>(gradient) =
          layer->tensors().cast(dy, layer->gradient(records), {needs_weight, needs_bias});
      dbias = gradient.sums;
      if (needs_x) {
        dx = product.input_gradient(gradient, x_dtype).view(context->saved_data["sizes"].toIntVector());
      }
      if (needs_weight) dweight = product.weight_gradient(gradient, input);
    }
    if (needs_bias && !dbias.defined()) dbias = dy.sum(0, /*keepdim=*/false, at::kFloat);
    if (needs_bias) dbias = dbias.to(bias_dtype);
    return {at::Tensor(), dx, dweight, dbias, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace

at::Tensor fp8_linear(const Fp8LayerPtr& layer, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias, bool records) {
  const int64_t in = weight.size(1);
  const bool has_rows = in > 0 && x.dim() > 0 && x.size(-1) == in;
  if (!multiplies(*layer, x, has_rows ? x.numel() / in : 0, weight)) return in_16_bits(x, weight, bias);
  const bool keeps_input = at::GradMode::is_enabled() && weight.requires_grad();
  return Fp8LinearNode::apply(layer, x, if_defined(weight), if_defined(bias), modules::Nf4Weight(nullptr),
                              records, keeps_input);
}

at::Tensor fp8_linear(const Fp8LayerPtr& layer, const at::Tensor& x, const modules::Nf4Weight& weight,
                      const at::Tensor& bias, bool records) {
  const int64_t in = weight->in_features;
  if (!multiplies(*layer, x, in > 0 ? x.numel() / in : 0, weight)) return {};
  return Fp8LinearNode::apply(layer, x, if_defined({}), if_defined(bias), weight, records,
                              /*keeps_input=*/false);
}

}  // namespace pacer::detail
