// Recomputation (activation checkpointing, Chen et al., arXiv:1604.06174): a region of the model keeps only
// its arguments for backward and runs again there. Activations of one region at a time exist; the price is a
// second forward pass.
//
//   auto y = pacer::recompute(*attention, &AttentionImpl::forward, x);
//   auto y = pacer::recompute(*attention, [this](torch::Tensor h) { return attention->forward(h); }, x);
//
// The second run sees what the first one saw: the random state of the CPU and of the region's devices,
// autocast, gates of a LayerDrop, buffers. All of it is put back afterwards, also where the second run
// throws. Not put back is a generator of the region's own: draw from LibTorch's default ones, or make it anew
// in each call of a seed that replayed() keeps (replayed.h). Gradients are those of plain training to the
// bit, as long as no argument has another consumer: autograd adds up several consumers' gradients in an order
// of its own. They agree to rounding also for a bias that is used twice under bf16 autocast, and for an LSTM
// on a CPU. Each gradient of a parameter arrives once per backward, so hooks on it run as without a region.
//
// What a fused layer (transformer_layer.h) gives at the end of a region is not computed a second time, because backward reads
// nothing of it; a function that keeps such a result for itself finds numbers there that are none.
//
// All else runs again, unless results of some operators are kept (kept_operators.h): more memory for less time.
//
// These would give wrong gradients and are errors, in backward where they cannot be seen earlier: an argument
// or parameter that is changed in place before backward; a tensor that needs a gradient and is neither an
// argument nor a parameter of the module; a module switched between train() and eval() before backward;
// second derivatives (create_graph). The function must own what it captures: it runs again after the scope
// that made it has ended, so capture an index by value.
#pragma once

#include <type_traits>
#include <utility>

#include <torch/nn/module.h>

#include <pacer/modules/kept_operators.h>
#include <pacer/modules/tensor_call.h>

namespace pacer {

// The same for a function of tensors. `name` is for errors: "block 3". Without gradients, f(x).
Tensors recompute_tensors(torch::nn::Module& module, const std::string& name, TensorFunction f, Tensors x,
                          const KeptOperators& kept = {});

// f(args...), where f uses the parameters of `module` and of no other; see tensor_call.h for arguments and
// results. f may be a member function of the module's class. Results of the operators in `kept` are not computed again.
template <class Module, class F, class... Args>
auto recompute(Module& module, const KeptOperators& kept, F f, Args... args) {
  static_assert(std::is_base_of_v<torch::nn::Module, Module>,
                "recompute needs the module whose parameters the function uses: *holder for a ModuleHolder");
  if constexpr (std::is_member_function_pointer_v<F>) {
    const auto call = [&module, f](auto&&... values) {
      return std::invoke(f, module, std::forward<decltype(values)>(values)...);
    };
    return recompute(static_cast<torch::nn::Module&>(module), kept, call, std::move(args)...);
  } else {
    using Call = detail::TensorCall<F, Args...>;
    Call call(std::move(f), std::move(args)...);
    return Call::Packed::unpack(
        recompute_tensors(module, module.name(), std::move(call.function), std::move(call.tensors), kept));
  }
}
template <class Module, class F, class... Args,
          std::enable_if_t<!std::is_same_v<F, KeptOperators>, bool> = true>
auto recompute(Module& module, F f, Args... args) {
  return recompute(module, KeptOperators(), std::move(f), std::move(args)...);
}

}  // namespace pacer
