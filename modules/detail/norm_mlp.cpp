#include <pacer/modules/detail/norm_mlp.h>

#include <algorithm>
#include <initializer_list>

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <pacer/modules/detail/adapted_forward.h>
#include <pacer/modules/detail/node_state.h>
#include <pacer/modules/detail/norm_rows.h>
#include <pacer/modules/detail/replay_memory.h>
#include <pacer/modules/detail/unfused_passes.h>

namespace pacer::detail {
namespace {

// Inputs of the node, in their order.
struct NormMlpNames {
  enum Input : size_t {
    kX,
    kBranch,
    kProjectionWeight,
    kProjectionBias,
    kNormWeight,
    kNormBias,
    kWeight1,
    kBias1,
    kWeight2,
    kBias2,
    kInputs
  };
};

struct NormMlpState : torch::CustomClassHolder {
  DefinedMask given;
  size_t defined;
  std::vector<bool> requires_grad;  // of inputs; none where no graph is made
  Fp8LayerPtr of_projection, of_fc1, of_fc2;
  Normalization normalization;
  double epsilon;
  Activation activation;
  kernels::Dropout projection_dropout, dropout;
  bool has_residual, records;
  bool is_unread;  // nobody reads the values of y
  at::ScalarType dtype;

  Norm norm(const at::Tensor& weight, const at::Tensor& bias) const {
    return {normalization, weight, bias, epsilon};
  }
  bool ends_with_sum() const { return has_residual || dropout.threshold != 0; }
};

// The three products, of inputs as forward gets them.
struct Products : NormMlpNames {
  Products(const NormMlpState& state, const Tensors& in)
      : projection(state.of_projection, in[kProjectionWeight], state.dtype, state.records),
        fc1(state.of_fc1, in[kWeight1], state.dtype, state.records),
        fc2(state.of_fc2, in[kWeight2], state.dtype, state.records) {}

  Product projection, fc1, fc2;
};

bool any_of(const std::vector<bool>& needs, std::initializer_list<NormMlpNames::Input> inputs) {
  return std::any_of(inputs.begin(), inputs.end(), [&](NormMlpNames::Input input) { return needs[input]; });
}

struct NormMlpNode : torch::autograd::Function<NormMlpNode>, FusedNode<NormMlpState>, NormMlpNames {
  static at::Tensor forward(Context* context, StatePtr state, at::TensorList tensors) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensors in = state->given.expand(tensors.vec());
    const Products products(*state, in);
    const auto use = [&](const Product& product, Input weight) {
      return OperandUse{&product, /*is_gradient=*/false, state->requires_grad[weight]};
    };

    Residual residual{in[kX], {}, in[kProjectionBias], state->projection_dropout};
    Operand of_branch;
    if (in[kBranch].defined()) {
      of_branch = cast_operand(in[kBranch], {}, use(products.projection, kProjectionWeight), /*sums=*/false);
      residual.branch = products.projection.forward(of_branch, {});
    }
    const Normalized normalized =
        normalize(residual, state->norm(in[kNormWeight], in[kNormBias]), use(products.fc1, kWeight1));
    const at::Tensor u = products.fc1.forward(normalized.y, {});
    const Operand activated = activate(u, in[kBias1], state->activation, use(products.fc2, kWeight2));
    at::Tensor y;
    if (state->is_unread) {
      y = unread_values({in[kX].size(0), in[kWeight2].size(0)},
                        in[kX].options().dtype(state->has_residual ? in[kX].scalar_type() : state->dtype));
    } else {
      ReplayMemory::note_last_product();
      y = products.fc2.forward(activated, state->ends_with_sum() ? at::Tensor() : in[kBias2]);
      if (state->ends_with_sum()) {
        y = add_residual({state->has_residual ? normalized.s : at::Tensor(), y, in[kBias2], state->dropout});
      }
    }

    Tensors kept = in;
    // Not read in backward, or only what follows from them.
    for (const Input input : {kX, kBranch, kProjectionBias, kNormBias, kBias2}) kept[input] = at::Tensor();
    kept.insert(kept.end(), {normalized.s, normalized.mean, normalized.rstd, u});
    save_operand(of_branch, state->requires_grad[kProjectionWeight], kept);
    save_operand(normalized.y, state->requires_grad[kWeight1], kept);
    save_operand(activated, state->requires_grad[kWeight2], kept);
    keep(context, std::move(state), std::move(kept));
    return y;
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    refuse_second_derivative();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const StatePtr state = state_of(context);
    Tensors result(kInputs);
    const at::Tensor& dy = gradients[0];
    if (!dy.defined()) return FusedNode::result(state->given, std::move(result));
    const std::vector<bool> needs = needed_gradients(context, state->given, state->defined);
    SavedTensors kept(context->get_saved_variables());
    Tensors in(kInputs);
    for (at::Tensor& tensor : in) tensor = kept.next();
    Normalized normalized;
    for (at::Tensor* tensor : {&normalized.s, &normalized.mean, &normalized.rstd}) *tensor = kept.next();
    normalized.s = readable(normalized.s);
    const at::Tensor u = kept.next();
    const Operand of_branch = kept.next_operand();
    normalized.y = kept.next_operand();
    const Operand activated = kept.next_operand();
    const Products products(*state, in);
    const auto use = [&](const Product& product, Input weight) {
      return OperandUse{&product, /*is_gradient=*/true, needs[weight]};
    };

    const Operand of_y = cast_operand(dy, state->dropout, use(products.fc2, kWeight2), needs[kBias2]);
    result[kBias2] = of_y.sums;
    if (needs[kWeight2]) result[kWeight2] = products.fc2.weight_gradient(of_y, activated);
    if (!any_of(needs, {kX, kBranch, kProjectionWeight, kProjectionBias, kNormWeight, kNormBias, kWeight1,
                        kBias1})) {
      return FusedNode::result(state->given, std::move(result));
    }
    const Operand of_u = activate_backward(u, in[kBias1], products.fc2.input_gradient(of_y, state->dtype),
                                           state->activation, use(products.fc1, kWeight1), needs[kBias1]);
    result[kBias1] = of_u.sums;
    if (needs[kWeight1]) result[kWeight1] = products.fc1.weight_gradient(of_u, normalized.y);
    if (!any_of(needs, {kX, kBranch, kProjectionWeight, kProjectionBias, kNormWeight, kNormBias})) {
      return FusedNode::result(state->given, std::move(result));
    }
    NormGradients of_norm = normalize_backward(
        products.fc1.input_gradient(of_u, state->dtype), normalized, state->norm(in[kNormWeight], {}),
        state->has_residual ? dy : at::Tensor(), needs[kNormWeight], needs[kNormBias]);
    result[kNormWeight] = std::move(of_norm.dweight);
    result[kNormBias] = std::move(of_norm.dbias);
    result[kX] = of_norm.ds;
    if (any_of(needs, {kBranch, kProjectionWeight, kProjectionBias})) {
      const Operand of_sum =
          cast_operand(of_norm.ds, state->projection_dropout, use(products.projection, kProjectionWeight),
                       needs[kProjectionBias]);
      result[kProjectionBias] = of_sum.sums;
      if (needs[kProjectionWeight]) {
        result[kProjectionWeight] = products.projection.weight_gradient(of_sum, of_branch);
      }
      if (needs[kBranch]) result[kBranch] = products.projection.input_gradient(of_sum, state->dtype);
    }
    return FusedNode::result(state->given, std::move(result));
  }
};

}  // namespace

at::Tensor norm_mlp(const FusedCall& call, const modules::LayerNormMlpImpl& mlp,
                    const kernels::Dropout& dropout, const ProjectedBranch& branch) {
  const Norm norm = call.norm_of(mlp);
  const bool is_unfused = is_adapted(*mlp.fc1) || is_adapted(*mlp.fc2);
  if (branch.x.defined() && (is_unfused || is_adapted(*branch.linear))) {
    const at::Tensor projected = adapted_forward(branch.x, {branch.linear}).front();
    return norm_mlp(call.behind(add_branch(call.x(), projected, branch.dropout)), mlp, dropout, {});
  }
  if (is_unfused) {
    const at::Tensor u = adapted_forward(norm_rows(call, norm), {mlp.fc1.get()}).front();
    const at::Tensor activated = activate_rows(u, mlp.options.activation());
    const at::Tensor y = adapted_forward(activated, {mlp.fc2.get()}).front();
    return add_branch(mlp.options.residual() ? call.x() : at::Tensor(), y, dropout);
  }
  const LinearInputs projection = branch.x.defined() ? call.inputs_of(*branch.linear) : LinearInputs(),
                     fc1 = call.inputs_of(*mlp.fc1), fc2 = call.inputs_of(*mlp.fc2);
  const Tensors all = {call.x(),  branch.x,   projection.weight, projection.bias, norm.weight,
                       norm.bias, fc1.weight, fc1.bias,          fc2.weight,      fc2.bias};
  auto state = c10::make_intrusive<NormMlpState>();
  state->given = DefinedMask(all);
  const Tensors defined = state->given.compact(all);
  state->defined = defined.size();
  for (const at::Tensor& tensor : all) {
    state->requires_grad.push_back(at::GradMode::is_enabled() && tensor.defined() && tensor.requires_grad());
  }
  state->of_projection = projection.fp8;
  state->of_fc1 = fc1.fp8;
  state->of_fc2 = fc2.fp8;
  state->normalization = norm.normalization;
  state->epsilon = norm.epsilon;
  state->activation = mlp.options.activation();
  state->projection_dropout = branch.dropout;
  state->dropout = dropout;
  state->has_residual = mlp.options.residual();
  state->records = call.records();
  state->dtype = call.dtype();
  state->is_unread = ReplayMemory::result_is_unread();
  return NormMlpNode::apply(std::move(state), at::TensorList(defined));
}

}  // namespace pacer::detail
