// "This parameter's gradient is ready": a callback after each accumulation, chained with one that is there.
#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

// From now on f(parameter) is called after every accumulation into parameter.grad(), on the thread and stream
// of that accumulation, as long as `owner` lives and remove_gradient_hook was not called.
void add_gradient_hook(const at::Tensor& parameter, std::weak_ptr<const void> owner,
                       std::function<void(const at::Tensor&)> f);
// Removes the hook that `owner` (its address) added.
void remove_gradient_hook(const at::Tensor& parameter, const void* owner);

}  // namespace pacer::detail
