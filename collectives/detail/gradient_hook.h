// "This parameter's gradient is ready": a callback after each accumulation, chained with one that is there.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

// From now on f(parameter) is called after every accumulation into parameter.grad(), on the thread and stream
// of that accumulation, as long as `owner` lives and remove_gradient_hook was not called.
void add_gradient_hook(const at::Tensor& parameter, std::weak_ptr<const void> owner,
                       std::function<void(const at::Tensor&)> f);

// Says which parameter received a gradient while none was expected, since the note was last emptied.
struct UnexpectedGradients {
  std::atomic<bool> are_expected{false};
  std::atomic<const void*> parameter{nullptr};  // its TensorImpl
};
// From now on every accumulation into parameter.grad() that comes unexpected is noted, until
// remove_gradient_hook(parameter, note.get()).
void note_unexpected_gradients(const at::Tensor& parameter, std::shared_ptr<UnexpectedGradients> note);

// Removes the hook that `owner` (its address) added.
void remove_gradient_hook(const at::Tensor& parameter, const void* owner);

}  // namespace pacer::detail
