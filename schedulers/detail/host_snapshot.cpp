#include <pacer/schedulers/detail/host_snapshot.h>

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace pacer::detail {

const NamedTensors& HostSnapshot::take(const std::string& group, const NamedTensors& tensors) {
  const at::NoGradGuard no_grad;
  NamedTensors& copies = groups_[group];
  NamedTensors former = std::exchange(copies, {});
  for (const auto& [name, tensor] : tensors) {
    const auto found = former.find(name);
    const bool fits = found != former.end() && found->second.sizes() == tensor.sizes() &&
                      found->second.scalar_type() == tensor.scalar_type();
    at::Tensor copy =
        fits ? std::move(found->second) : at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()));
    copy.copy_(tensor);
    copies.emplace(name, std::move(copy));
  }
  return copies;
}

}  // namespace pacer::detail
