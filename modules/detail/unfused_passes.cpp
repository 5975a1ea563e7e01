#include <pacer/modules/detail/unfused_passes.h>

#include <algorithm>
#include <utility>

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <pacer/modules/detail/node_state.h>
#include <pacer/modules/detail/passes.h>

namespace pacer::detail {
namespace {

// A product that is none: what is made for it is of this dtype.
Product no_product(at::ScalarType dtype) { return {nullptr, {}, dtype, /*records=*/false}; }

struct SplitState : torch::CustomClassHolder {
  DefinedMask given;
  size_t defined;
  HeadRows heads;  // without weights, which are inputs
};

struct SplitNode : torch::autograd::Function<SplitNode>, FusedNode<SplitState> {
  enum Input : size_t { kQkv, kQWeight, kKWeight, kInputs };

  static Tensors forward(Context* context, StatePtr state, at::TensorList tensors) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensors in = state->given.expand(tensors.vec());
    const HeadRows heads = state->heads.with(in[kQWeight], in[kKWeight]);
    Tensors kept = {in[kQWeight], in[kKWeight], heads.are_normalized() ? in[kQkv] : at::Tensor()};
    keep(context, std::move(state), std::move(kept));
    return split_heads(heads, in[kQkv]);
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    refuse_second_derivative();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const StatePtr state = state_of(context);
    const std::vector<bool> needs = needed_gradients(context, state->given, state->defined);
    Tensors result(kInputs);
    if (std::any_of(gradients.begin(), gradients.end(), [](const at::Tensor& g) { return g.defined(); })) {
      SavedTensors kept(context->get_saved_variables());
      const at::Tensor q_weight = kept.next(), k_weight = kept.next(), qkv = kept.next();
      HeadGradients joined =
          join_heads(state->heads.with(q_weight, k_weight), gradients, qkv, needs[kQWeight], needs[kKWeight]);
      result = {std::move(joined.qkv), std::move(joined.q_weight), std::move(joined.k_weight)};
    }
    return FusedNode::result(state->given, std::move(result));
  }
};

struct ActivateState : torch::CustomClassHolder {
  Activation activation;
};

struct ActivateNode : torch::autograd::Function<ActivateNode>, FusedNode<ActivateState> {
  static at::Tensor forward(Context* context, StatePtr state, const at::Tensor& u) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Product none = no_product(u.scalar_type());
    Operand activated = activate(u, {}, state->activation, {&none});
    keep(context, std::move(state), {u});
    return std::move(activated.values);
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    refuse_second_derivative();
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::Tensor u = context->get_saved_variables()[0];
    const Product none = no_product(u.scalar_type());
    return {at::Tensor(), activate_backward(u, {}, gradients[0], state_of(context)->activation,
                                            {&none, /*is_gradient=*/true}, /*sums=*/false)
                              .values};
  }
};

struct BranchState : torch::CustomClassHolder {
  kernels::Dropout dropout;
  at::ScalarType dtype;  // of the branch
  size_t inputs;         // x, if there is one, and the branch
};

struct BranchNode : torch::autograd::Function<BranchNode>, FusedNode<BranchState> {
  static at::Tensor forward(Context* context, StatePtr state, at::TensorList tensors) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::Tensor x = state->inputs > 1 ? tensors[0] : at::Tensor();
    at::Tensor sum = add_residual({x, tensors.back(), {}, state->dropout});
    keep(context, std::move(state), {});
    return sum;
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    refuse_second_derivative();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const StatePtr state = state_of(context);
    Tensors result(1 + state->inputs);  // the state's first
    if (!gradients[0].defined()) return result;
    if (state->inputs > 1) result[1] = gradients[0];
    if (context->needs_input_grad(state->inputs - 1)) {
      const Product none = no_product(state->dtype);
      result.back() = cast_operand(gradients[0], state->dropout, {&none, /*is_gradient=*/true},
                                   /*sums=*/false)
                          .values;
    }
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> split_rows(const at::Tensor& qkv, const HeadRows& heads) {
  auto state = c10::make_intrusive<SplitState>();
  const Tensors all = {qkv, heads.q_weight, heads.k_weight};
  state->given = DefinedMask(all);
  const Tensors defined = state->given.compact(all);
  state->defined = defined.size();
  state->heads = heads.with({}, {});
  return SplitNode::apply(std::move(state), at::TensorList(defined));
}

at::Tensor activate_rows(const at::Tensor& u, Activation activation) {
  auto state = c10::make_intrusive<ActivateState>();
  state->activation = activation;
  return ActivateNode::apply(std::move(state), u);
}

at::Tensor add_branch(const at::Tensor& x, const at::Tensor& branch, const kernels::Dropout& dropout) {
  if (!x.defined() && dropout.threshold == 0) return branch;
  auto state = c10::make_intrusive<BranchState>();
  state->dropout = dropout;
  state->dtype = branch.scalar_type();
  Tensors inputs = {branch};
  if (x.defined()) inputs.insert(inputs.begin(), x);
  state->inputs = inputs.size();
  return BranchNode::apply(std::move(state), at::TensorList(inputs));
}

}  // namespace pacer::detail
