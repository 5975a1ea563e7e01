#include <pacer/collectives/detail/gradient_hook.h>

#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace pacer::detail {
namespace {

using torch::autograd::PostAccumulateGradHook;

// LibTorch has one place for such a hook: whoever was there first is called first.
struct ChainedHook : PostAccumulateGradHook {
  void operator()(const at::Tensor& parameter) override {
    if (former) (*former)(parameter);
    if (const auto alive = owner.lock()) f(parameter);
  }
  std::unique_ptr<PostAccumulateGradHook> former;
  std::weak_ptr<const void> owner;
  const void* owner_address = nullptr;
  std::function<void(const at::Tensor&)> f;
};

}  // namespace

void add_gradient_hook(const at::Tensor& parameter, std::weak_ptr<const void> owner,
                       std::function<void(const at::Tensor&)> f) {
  auto hook = std::make_unique<ChainedHook>();
  hook->former = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
  hook->owner_address = owner.lock().get();
  hook->owner = std::move(owner);
  hook->f = std::move(f);
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
}

void remove_gradient_hook(const at::Tensor& parameter, const void* owner) {
  std::unique_ptr<PostAccumulateGradHook>* place = &torch::autograd::impl::post_acc_grad_hooks(parameter);
  while (auto* hook = dynamic_cast<ChainedHook*>(place->get())) {
    if (hook->owner_address == owner) {
      *place = std::move(hook->former);
      return;
    }
    place = &hook->former;
  }
}

}  // namespace pacer::detail
