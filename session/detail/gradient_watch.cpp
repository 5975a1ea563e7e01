#include <pacer/session/detail/gradient_watch.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>

namespace pacer::detail {
namespace {

constexpr int64_t kNoGradient = -1;
constexpr int64_t kFrozen = -2;  // nor needed one

std::string watched_name(const SessionParts& parts, const void* parameter) {
  for (const auto& [name, tensor] : named_optimizer_parameters(parts)) {
    if (tensor.unsafeGetTensorImpl() == parameter) return name;
  }
  return "that is no longer the optimizer's";
}

}  // namespace

GradientWatch::~GradientWatch() {
  for (const at::Tensor& parameter : parameters_) remove_gradient_hook(parameter, arrivals_.get());
}

// Nothing but a comparison while the optimizer's list stays the same.
void GradientWatch::follow_list(const SessionParts& parts) {
  const auto is_same = [](const at::Tensor& a, const at::Tensor& b, size_t) { return a.is_same(b); };
  if (is_list(parameters_, parts.optimizer().param_groups(), is_same)) return;
  std::vector<at::Tensor> now = all_optimizer_parameters(parts);
  std::unordered_set<const void*> before, after;
  for (const at::Tensor& parameter : parameters_) before.insert(parameter.unsafeGetTensorImpl());
  for (const at::Tensor& parameter : now) after.insert(parameter.unsafeGetTensorImpl());
  for (const at::Tensor& parameter : parameters_) {
    if (after.count(parameter.unsafeGetTensorImpl()) == 0) remove_gradient_hook(parameter, arrivals_.get());
  }
  for (const at::Tensor& parameter : now) {
    if (!parameter.defined() || !before.insert(parameter.unsafeGetTensorImpl()).second) continue;
    // What a parameter has from passes before it joined was no optimizer's to use or to clear.
    if (!parameters_.empty()) parameter.mutable_grad().reset();
    note_unexpected_gradients(parameter, arrivals_);
  }
  const bool only_grew = parameters_.size() <= now.size() &&
                         std::equal(parameters_.begin(), parameters_.end(), now.begin(),
                                    [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
  if (!only_grew) {
    gradients_.clear();
    versions_.clear();
  }
  parameters_ = std::move(now);
}

void GradientWatch::begin_pass(const SessionParts& parts, bool is_first) {
  if (is_first) {
    follow_list(parts);
    clear_leftovers(parts);
    forget();
    return;
  }
  require(
      !all_are_gone() && !all_became_zero(), "the gradients of the window's first ",
      parts.progress.micro_step, " of ", parts.progress.micro_steps,
      " micro-steps are gone; delete zero_grad() from the loop, because the Session clears gradients after "
      "each step by itself");
  check(parts);
  clear_frozen();
}

void GradientWatch::end_pass(const SessionParts& parts) {
  arrivals_->are_expected = false;
  const bool is_last = parts.progress.micro_step + 1 >= parts.progress.micro_steps;
  versions_.resize(parameters_.size());
  gradients_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    versions_[i] = gradient.defined()               ? static_cast<int64_t>(parameters_[i]._version())
                   : parameters_[i].requires_grad() ? kNoGradient
                                                    : kFrozen;
    if (!is_last) gradients_.emplace_back(gradient);
  }
}

void GradientWatch::check(const SessionParts& parts) {
  check_update();
  check_arrivals(parts);
  follow_list(parts);
}

bool GradientWatch::has_seen_any() const {
  return std::any_of(versions_.begin(), versions_.end(), [](int64_t version) { return version >= 0; });
}

std::vector<at::Tensor> GradientWatch::joined_since_pass() const {
  std::vector<at::Tensor> joined;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (i >= versions_.size() || versions_[i] == kFrozen) joined.push_back(parameters_[i]);
  }
  return joined;
}

void GradientWatch::forget() {
  arrivals_->are_expected = false;
  gradients_.clear();
  versions_.clear();
  arrivals_->parameter = nullptr;
}

void GradientWatch::clear_leftovers(const SessionParts& parts) {
  int64_t count = 0;
  const void* first = nullptr;
  for (const at::Tensor& parameter : parameters_) {
    if (!parameter.grad().defined()) continue;
    parameter.mutable_grad().reset();
    if (count++ == 0) first = parameter.unsafeGetTensorImpl();
  }
  if (count == 0 || !warns_of_leftovers_.take()) return;
  TORCH_WARN(concatenate(
      count, " parameters of the optimizer had a gradient when a window of the Session began (the first: ",
      watched_name(parts, first),
      "), from a backward() that is not this Session's; it was cleared and does not count. Give "
      "Session::backward the sum of all losses; where another loss only passes through these "
      "parameters, as in a GAN, call zero_grad() of their optimizer before begin()"));
}

// A parameter that is frozen inside a window is not moved by it.
void GradientWatch::clear_frozen() {
  for (const at::Tensor& parameter : parameters_) {
    if (!parameter.requires_grad() && parameter.grad().defined()) parameter.mutable_grad().reset();
  }
}

void GradientWatch::check_arrivals(const SessionParts& parts) const {
  const void* parameter = arrivals_->parameter;
  if (parameter == nullptr) return;
  throw InvalidArgument(concatenate(
      "parameter ", watched_name(parts, parameter),
      " received a gradient from a backward() that is not this Session's, between the first backward of a "
      "window and its step; give Session::backward the sum of all losses, or keep the other loss away from "
      "these parameters: with detach(), or by taking its step before or after the whole window"));
}

// Once per window at most, and no longer where one parameter is as it was.
void GradientWatch::check_update() {
  bool any = false;
  for (size_t i = 0; i < versions_.size(); ++i) {
    if (versions_[i] < 0) continue;
    if (static_cast<int64_t>(parameters_[i]._version()) == versions_[i]) return;
    any = true;
  }
  if (!any || !warns_of_update_.take()) return;
  TORCH_WARN(
      "all parameters of the optimizer were changed between Session::backward and Session::step; if the "
      "optimizer's step() stands in the loop, delete it, because Session::step takes it");
}

bool GradientWatch::all_are_gone() const {
  bool there_were = false;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!gradients_[i].was_defined()) continue;
    there_were = true;
    if (parameters_[i].grad().defined()) return false;
  }
  return there_were;
}

// Looks at values only where every gradient was written to, and no more once they were not zeros.
bool GradientWatch::all_became_zero() {
  if (writing_is_meant_) return false;
  bool there_were = false;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const at::Tensor& now = parameters_[i].grad();
    if (!gradients_[i].was_defined() || !now.defined()) continue;
    there_were = true;
    if (gradients_[i].is_unchanged(now)) return false;
  }
  if (!there_were) return false;
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters_) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    if (gradient.is_sparse() || gradient.ne(0).any().item<bool>()) {
      writing_is_meant_ = true;
      return false;
    }
  }
  return true;
}

void GradientWatch::check_scope(const SessionParts& parts, const ForwardScope& scope) {
  if (!scope.was_unused()) return;
  const auto acts = [](const auto& hook) { return hook->acts_in_forward(); };
  if (std::none_of(parts.hooks().begin(), parts.hooks().end(), acts)) return;
  if (!warns_of_scope_.take()) return;
  TORCH_WARN(
      "the Batch of Session::begin ended before the forward pass, which therefore ran without autocast and "
      "what else hooks switch on for it; keep it until backward: auto [x, y] = session.begin(...)");
}

}  // namespace pacer::detail
