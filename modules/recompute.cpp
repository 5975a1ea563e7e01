#include <pacer/modules/recompute.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/region.h>
#include <pacer/modules/detail/replay_ahead.h>

namespace pacer {
namespace {

using detail::Region;
using RegionPtr = c10::intrusive_ptr<Region>;

constexpr const char* kRegion = "region";

Tensors saved_arguments(const torch::autograd::AutogradContext& context, const Region& region) {
  try {
    return context.get_saved_variables();
  } catch (const c10::Error& error) {
    const bool was_changed = std::string(error.what_without_backtrace()).find("inplace") != std::string::npos;
    require(!was_changed, "an argument of ", region.name(),
            " was changed in place between forward and backward, so it cannot be recomputed from it; "
            "change a copy");
    throw;
  }
}

// Inputs: the region, then its arguments, then its parameters.
struct RecomputeNode : torch::autograd::Function<RecomputeNode> {
  static Tensors forward(torch::autograd::AutogradContext* context, RegionPtr region,
                         at::TensorList arguments, at::TensorList /*parameters*/) {
    const Tensors x = arguments.vec();
    Tensors y = region->run_first(x);
    context->save_for_backward(x);
    // An unused result must not give zeros to parameters that only it depends on.
    context->set_materialize_grads(false);
    context->saved_data[kRegion] = c10::IValue::make_capsule(std::move(region));
    return y;
  }

  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const auto region = c10::static_intrusive_pointer_cast<Region>(context->saved_data[kRegion].toCapsule());
    const Tensors x = saved_arguments(*context, *region);
    const size_t count = x.size() + region->parameters().size();
    std::vector<bool> is_needed(count);
    for (size_t i = 0; i < count; ++i) is_needed[i] = context->needs_input_grad(i);
    Tensors result = region->run_again(x, gradients, is_needed);
    result.insert(result.begin(), at::Tensor());  // the region itself
    return result;
  }
};

bool any_needs_gradient(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

}  // namespace

void detail::replay_ahead(const at::Tensor& result) {
  using Node = torch::autograd::CppNode<RecomputeNode>;
  auto* const node = dynamic_cast<Node*>(result.grad_fn().get());
  if (node == nullptr) return;
  const auto& saved = node->ctx_.saved_data;
  const auto region = c10::static_intrusive_pointer_cast<Region>(saved.at(kRegion).toCapsule());
  region->replay(saved_arguments(node->ctx_, *region));
}

Tensors recompute_tensors(torch::nn::Module& module, const std::string& name, TensorFunction f, Tensors x,
                          const KeptOperators& kept) {
  if (!at::GradMode::is_enabled()) return f(x);
  // Nodes of a graph take and give defined tensors only.
  const detail::DefinedMask given(x);
  const auto of_defined = [f = std::move(f), given](const Tensors& in) { return f(given.expand(in)); };
  const Tensors arguments = given.compact(std::move(x));
  const auto region = c10::make_intrusive<Region>(module, name, of_defined, arguments, kept);
  const Tensors& parameters = region->parameters();
  const bool needs_gradient = any_needs_gradient(arguments) || any_needs_gradient(parameters);
  return region->results().expand(
      needs_gradient ? RecomputeNode::apply(region, at::TensorList(arguments), at::TensorList(parameters))
                     : region->run_first(arguments));
}

}  // namespace pacer
