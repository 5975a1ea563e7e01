// What the nodes of fused layers share: optional inputs, which gradients are wanted, and tensors that are
// kept in one order.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class_detail.h>

#include <pacer/modules/detail/defined_mask.h>
#include <pacer/modules/detail/matrix.h>
#include <pacer/modules/tensor_call.h>

namespace pacer::detail {

// What all nodes share whose inputs are a state and a list of tensors, some of them undefined.
template <class State>
struct FusedNode {
  using Context = torch::autograd::AutogradContext;
  using StatePtr = c10::intrusive_ptr<State>;
  static constexpr const char* kState = "state";

  static void keep(Context* context, StatePtr state, Tensors tensors) {
    context->save_for_backward(std::move(tensors));
    context->set_materialize_grads(false);
    context->saved_data[kState] = c10::IValue::make_capsule(std::move(state));
  }
  static StatePtr state_of(Context* context) {
    return c10::static_intrusive_pointer_cast<State>(context->saved_data[kState].toCapsule());
  }

  // For every input, defined or not.
  static std::vector<bool> needed_gradients(Context* context, const DefinedMask& given, size_t defined) {
    std::vector<bool> needed(defined);
    for (size_t i = 0; i < defined; ++i) needed[i] = context->needs_input_grad(i);
    return given.expand(needed);
  }
  // What backward returns, from gradients of every input.
  static Tensors result(const DefinedMask& given, Tensors gradients) {
    gradients = given.compact(std::move(gradients));
    gradients.insert(gradients.begin(), at::Tensor());  // the state
    return gradients;
  }
};

// Saved tensors, one after the other.
class SavedTensors {
 public:
  explicit SavedTensors(Tensors tensors) : tensors_(std::move(tensors)) {}
  at::Tensor next() { return std::move(tensors_[next_++]); }
  // Returns the next operand as `save_operand` left it.
  Operand next_operand() {
    Operand operand;
    operand.values = next();
    operand.transposed = next();
    operand.inverse = next();
    return operand;
  }

 private:
  Tensors tensors_;
  size_t next_ = 0;
};

// What the product of the weight's gradient takes of it, where there will be one.
inline void save_operand(const Operand& operand, bool for_weight, Tensors& tensors) {
  tensors.insert(tensors.end(),
                 {for_weight ? operand.values : at::Tensor(), operand.transposed, operand.inverse});
}

}  // namespace pacer::detail
