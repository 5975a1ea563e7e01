#include <pacer/modules/detail/norm_linear.h>

#include <algorithm>

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <pacer/modules/detail/node_state.h>

namespace pacer::detail {
namespace {

// Inputs of the node, in their order.
struct NormLinearNames {
  enum Input : size_t { kX, kNormWeight, kNormBias, kWeight, kBias, kInputs };
};

struct NormLinearState : torch::CustomClassHolder {
  DefinedMask given;
  size_t defined;
  Normalization normalization;
  double epsilon;
  Fp8LayerPtr fp8;
  at::ScalarType dtype;
  bool records, keeps_input, in_three;

  Product product(const at::Tensor& weight) const { return {fp8, weight, dtype, records}; }
  Norm norm(const at::Tensor& weight, const at::Tensor& bias) const {
    return {normalization, weight, bias, epsilon};
  }
};

// Of its columns. No views as far as the graph is concerned, whose nodes may not give several of one tensor.
Tensors thirds(const at::Tensor& y) {
  const at::AutoDispatchBelowADInplaceOrView no_views;
  const int64_t width = y.size(1) / 3;
  return {y.narrow(1, 0, width), y.narrow(1, width, width), y.narrow(1, 2 * width, width)};
}

struct NormLinearNode : torch::autograd::Function<NormLinearNode>,
                        FusedNode<NormLinearState>,
                        NormLinearNames {
  static Tensors forward(Context* context, StatePtr state, at::TensorList tensors) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensors in = state->given.expand(tensors.vec());
    const Product product = state->product(in[kWeight]);
    const Normalized normalized = normalize({in[kX], {}, {}, {}}, state->norm(in[kNormWeight], in[kNormBias]),
                                            {&product, /*is_gradient=*/false, state->keeps_input});
    const at::Tensor y = product.forward(normalized.y, in[kBias]);
    Tensors kept = {in[kX], normalized.mean, normalized.rstd, in[kNormWeight], in[kWeight]};
    save_operand(normalized.y, state->keeps_input, kept);
    const bool in_three = state->in_three;
    keep(context, std::move(state), std::move(kept));
    Tensors results = in_three ? thirds(y) : Tensors{y};
    results.push_back(in[kX]);
    return results;
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    refuse_second_derivative();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const StatePtr state = state_of(context);
    const std::vector<bool> needs = needed_gradients(context, state->given, state->defined);
    Tensors result(kInputs);
    const at::Tensor& dx = gradients.back();
    Tensors dy(gradients.begin(), gradients.end() - 1);
    const auto given =
        std::find_if(dy.begin(), dy.end(), [](const at::Tensor& part) { return part.defined(); });
    if (given == dy.end()) {
      result[kX] = dx;
      return FusedNode::result(state->given, std::move(result));
    }
    for (at::Tensor& part : dy) part = part.defined() ? part : at::zeros_like(*given);
    SavedTensors kept(context->get_saved_variables());
    Normalized normalized;
    normalized.s = readable(kept.next());
    normalized.mean = kept.next();
    normalized.rstd = kept.next();
    const at::Tensor norm_weight = kept.next(), weight = kept.next();
    normalized.y = kept.next_operand();
    const Product product = state->product(weight);
    const Operand gradient =
        cast_operand(dy, {}, {&product, /*is_gradient=*/true, needs[kWeight]}, needs[kBias]);
    if (needs[kWeight]) result[kWeight] = product.weight_gradient(gradient, normalized.y);
    result[kBias] = gradient.sums;
    if (needs[kX] || needs[kNormWeight] || needs[kNormBias]) {
      NormGradients of_norm =
          normalize_backward(product.input_gradient(gradient, state->dtype), normalized,
                             state->norm(norm_weight, {}), dx, needs[kNormWeight], needs[kNormBias]);
      result[kX] = std::move(of_norm.ds);
      result[kNormWeight] = std::move(of_norm.dweight);
      result[kNormBias] = std::move(of_norm.dbias);
    }
    return FusedNode::result(state->given, std::move(result));
  }
};

}  // namespace

NormLinearResults norm_linear(const FusedCall& call, const Norm& norm, const modules::LinearImpl& linear,
                              bool in_three) {
  const LinearInputs product = call.inputs_of(linear);
  const Tensors all = {call.x(), norm.weight, norm.bias, product.weight, product.bias};
  auto state = c10::make_intrusive<NormLinearState>();
  state->given = DefinedMask(all);
  const Tensors defined = state->given.compact(all);
  state->defined = defined.size();
  state->normalization = norm.normalization;
  state->epsilon = norm.epsilon;
  state->fp8 = product.fp8;
  state->dtype = call.dtype();
  state->records = call.records();
  state->keeps_input = at::GradMode::is_enabled() && product.weight.requires_grad();
  state->in_three = in_three;
  Tensors y = NormLinearNode::apply(std::move(state), at::TensorList(defined));
  at::Tensor x = std::move(y.back());
  y.pop_back();
  return {std::move(y), std::move(x)};
}

}  // namespace pacer::detail
