#include <pacer/modules/detail/norm_linear.h>

#include <algorithm>
#include <optional>

#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <pacer/modules/detail/adapted_forward.h>
#include <pacer/modules/detail/node_state.h>
#include <pacer/modules/detail/norm_rows.h>
#include <pacer/modules/detail/unfused_passes.h>

namespace pacer::detail {
namespace {

// Inputs of the node, in their order.
struct NormLinearNames {
  enum Input : size_t { kX, kNormWeight, kNormBias, kWeight, kBias, kQWeight, kKWeight, kInputs };
};

struct NormLinearState : torch::CustomClassHolder {
  DefinedMask given;
  size_t defined;
  Normalization normalization;
  double epsilon;
  Fp8LayerPtr fp8;
  at::ScalarType dtype;
  bool records, keeps_input;
  std::optional<HeadRows> heads;  // without weights, which are inputs

  Product product(const at::Tensor& weight) const { return {fp8, weight, dtype, records}; }
  Norm norm(const at::Tensor& weight, const at::Tensor& bias) const {
    return {normalization, weight, bias, epsilon};
  }
};

// Whether gradients of heads are columns as they come, in three matrices of one shape, which a cast reads where they
// lie.
bool are_thirds(const HeadRows& heads) {
  return !heads.are_rotated() && !heads.are_normalized() && heads.kv_heads == heads.heads;
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
    Tensors results = {y};
    if (state->heads) {
      const HeadRows heads = state->heads->with(in[kQWeight], in[kKWeight]);
      results = split_heads(heads, y);
      kept.insert(kept.end(), {in[kQWeight], in[kKWeight], heads.are_normalized() ? y : at::Tensor()});
    }
    keep(context, std::move(state), std::move(kept));
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
    SavedTensors kept(context->get_saved_variables());
    Normalized normalized;
    normalized.s = readable(kept.next());
    normalized.mean = kept.next();
    normalized.rstd = kept.next();
    const at::Tensor norm_weight = kept.next(), weight = kept.next();
    normalized.y = kept.next_operand();
    if (state->heads) {
      const at::Tensor q_weight = kept.next(), k_weight = kept.next(), qkv = kept.next();
      const HeadRows heads = state->heads->with(q_weight, k_weight);
      if (are_thirds(heads)) {
        for (at::Tensor& part : dy) part = part.defined() ? part : at::zeros_like(*given);
      } else {
        HeadGradients joined = join_heads(heads, std::move(dy), qkv, needs[kQWeight], needs[kKWeight]);
        dy = {std::move(joined.qkv)};
        result[kQWeight] = std::move(joined.q_weight);
        result[kKWeight] = std::move(joined.k_weight);
      }
    }
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
                              const HeadRows* heads) {
  if (is_adapted(linear)) {
    at::Tensor y = adapted_forward(norm_rows(call, norm), {&linear}).front();
    return {heads == nullptr ? Tensors{std::move(y)} : split_rows(y, *heads), call.x()};
  }
  const LinearInputs product = call.inputs_of(linear);
  const auto of_heads = [&](int which) {  // the weight of a norm
    if (heads == nullptr) return at::Tensor();
    return which == 0 ? heads->q_weight : heads->k_weight;
  };
  const Tensors all = {call.x(),     norm.weight, norm.bias,  product.weight,
                       product.bias, of_heads(0), of_heads(1)};
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
  if (heads != nullptr) state->heads = heads->with({}, {});
  Tensors y = NormLinearNode::apply(std::move(state), at::TensorList(defined));
  at::Tensor x = std::move(y.back());
  y.pop_back();
  return {std::move(y), std::move(x)};
}

}  // namespace pacer::detail
