#include <pacer/collectives/detail/gradient_hook.h>

#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace pacer::detail {
namespace {

using torch::autograd::PostAccumulateGradHook;

// LibTorch has one place for such a hook: whoever was there first is called first.
struct ChainedHook : PostAccumulateGradHook {
  explicit ChainedHook(const void* owner) : owner_address(owner) {}
  void operator()(const at::Tensor& parameter) override {
    if (former) (*former)(parameter);
    arrived(parameter);
  }
  virtual void arrived(const at::Tensor& parameter) = 0;

  std::unique_ptr<PostAccumulateGradHook> former;
  const void* owner_address;
};

struct CallingHook final : ChainedHook {
  CallingHook(std::weak_ptr<const void> its_owner, std::function<void(const at::Tensor&)> its_f)
      : ChainedHook(its_owner.lock().get()), owner(std::move(its_owner)), f(std::move(its_f)) {}
  void arrived(const at::Tensor& parameter) override {
    if (const auto alive = owner.lock()) f(parameter);
  }
  std::weak_ptr<const void> owner;
  std::function<void(const at::Tensor&)> f;
};

struct NotingHook final : ChainedHook {
  explicit NotingHook(std::shared_ptr<UnexpectedGradients> its_note)
      : ChainedHook(its_note.get()), note(std::move(its_note)) {}
  void arrived(const at::Tensor& parameter) override {
    if (!note->are_expected.load(std::memory_order_relaxed))
      note->parameter = parameter.unsafeGetTensorImpl();
  }
  std::shared_ptr<UnexpectedGradients> note;
};

// A tensor that never needed a gradient has nowhere to keep hooks yet.
void chain(const at::Tensor& parameter, std::unique_ptr<ChainedHook> hook) {
  torch::autograd::impl::materialize_autograd_meta(parameter);
  hook->former = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
}

}  // namespace

void add_gradient_hook(const at::Tensor& parameter, std::weak_ptr<const void> owner,
                       std::function<void(const at::Tensor&)> f) {
  chain(parameter, std::make_unique<CallingHook>(std::move(owner), std::move(f)));
}

void note_unexpected_gradients(const at::Tensor& parameter, std::shared_ptr<UnexpectedGradients> note) {
  chain(parameter, std::make_unique<NotingHook>(std::move(note)));
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
