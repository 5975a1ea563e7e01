#include <pacer/hooks/detail/wide_gradients.h>

#include <atomic>
#include <unordered_set>

#include <ATen/core/grad_mode.h>

#include <pacer/collectives/detail/gradient_hook.h>

namespace pacer::detail {
namespace {

bool is_narrow(const at::Tensor& parameter) {
  return parameter.defined() &&
         (parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kHalf);
}

void convert(const at::Tensor& parameter, at::ScalarType from, at::ScalarType to) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (!gradient.defined() || gradient.scalar_type() != from) return;
  const at::NoGradGuard no_grad;
  gradient = gradient.detach().to(to);
}

}  // namespace

struct WideGradients::State {
  enum class Mode { idle, widen, round };
  std::atomic<Mode> mode{Mode::idle};  // hooks run on autograd's threads

  void arrive(const at::Tensor& parameter) const {
    if (mode == Mode::widen) convert(parameter, parameter.scalar_type(), at::kFloat);
    if (mode == Mode::round) convert(parameter, at::kFloat, parameter.scalar_type());
  }
};

WideGradients::WideGradients() : state_(std::make_shared<State>()) {}

WideGradients::~WideGradients() {
  for (const auto& item : parameters_) remove_gradient_hook(item.second, state_.get());
}

void WideGradients::watch(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> listed;
  for (const at::Tensor& parameter : parameters) listed.insert(parameter.unsafeGetTensorImpl());
  for (auto item = parameters_.begin(); item != parameters_.end();) {
    if (listed.count(item->first) != 0) {
      ++item;
      continue;
    }
    remove_gradient_hook(item->second, state_.get());
    item = parameters_.erase(item);
  }
  for (const at::Tensor& parameter : parameters) {
    if (!is_narrow(parameter) || !parameter.requires_grad()) continue;
    if (!parameters_.emplace(parameter.unsafeGetTensorImpl(), parameter).second) continue;
    add_gradient_hook(parameter, state_,
                      [state = state_.get()](const at::Tensor& reached) { state->arrive(reached); });
  }
}

void WideGradients::begin_pass() { state_->mode = State::Mode::widen; }
void WideGradients::begin_last_pass() { state_->mode = State::Mode::round; }
void WideGradients::end_pass() { state_->mode = State::Mode::idle; }

void WideGradients::round_the_rest() {
  for (const auto& item : parameters_) convert(item.second, at::kFloat, item.second.scalar_type());
}

void WideGradients::widen(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (is_narrow(parameter)) convert(parameter, parameter.scalar_type(), at::kFloat);
  }
}

}  // namespace pacer::detail
