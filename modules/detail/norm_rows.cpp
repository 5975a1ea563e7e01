#include <pacer/modules/detail/norm_rows.h>

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <pacer/modules/detail/node_state.h>

namespace pacer::detail {
namespace {

// Inputs of the node, in their order.
struct NormRowsNames {
  enum Input : size_t { kX, kWeight, kBias, kInputs };
};

struct NormRowsState : torch::CustomClassHolder {
  DefinedMask given;
  size_t defined;
  Normalization normalization;
  double epsilon;
  at::ScalarType dtype;

  Norm norm(const at::Tensor& weight, const at::Tensor& bias) const {
    return {normalization, weight, bias, epsilon};
  }
};

struct NormRowsNode : torch::autograd::Function<NormRowsNode>, FusedNode<NormRowsState>, NormRowsNames {
  static at::Tensor forward(Context* context, StatePtr state, at::TensorList tensors) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensors in = state->given.expand(tensors.vec());
    // It multiplies nothing; the dtype of what is made is that of a product in 16 or 32 bits.
    const Product none(nullptr, {}, state->dtype, /*records=*/false);
    const Normalized normalized =
        normalize({in[kX], {}, {}, {}}, state->norm(in[kWeight], in[kBias]), {&none});
    Tensors kept = {in[kX], normalized.mean, normalized.rstd, in[kWeight]};
    keep(context, std::move(state), std::move(kept));
    return normalized.y.values;
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    refuse_second_derivative();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const StatePtr state = state_of(context);
    const std::vector<bool> needs = needed_gradients(context, state->given, state->defined);
    Tensors result(kInputs);
    if (gradients[0].defined()) {
      SavedTensors kept(context->get_saved_variables());
      Normalized normalized;
      normalized.s = readable(kept.next());
      normalized.mean = kept.next();
      normalized.rstd = kept.next();
      NormGradients found = normalize_backward(gradients[0], normalized, state->norm(kept.next(), {}), {},
                                               needs[kWeight], needs[kBias]);
      result[kX] = std::move(found.ds);
      result[kWeight] = std::move(found.dweight);
      result[kBias] = std::move(found.dbias);
    }
    return FusedNode::result(state->given, std::move(result));
  }
};

}  // namespace

at::Tensor norm_rows(const FusedCall& call, const Norm& norm) {
  const Tensors all = {call.x(), norm.weight, norm.bias};
  auto state = c10::make_intrusive<NormRowsState>();
  state->given = DefinedMask(all);
  const Tensors defined = state->given.compact(all);
  state->defined = defined.size();
  state->normalization = norm.normalization;
  state->epsilon = norm.epsilon;
  state->dtype = call.dtype();
  return NormRowsNode::apply(std::move(state), at::TensorList(defined));
}

}  // namespace pacer::detail
