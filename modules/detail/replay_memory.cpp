#include <pacer/modules/detail/replay_memory.h>

#include <limits>
#include <utility>
#include <vector>

#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <pacer/modules/replayed.h>

namespace pacer::detail {
namespace {

thread_local ReplayMemory::Scope* innermost = nullptr;

}  // namespace

ReplayMemory::Scope::Scope(ReplayMemory& memory) : memory_(memory), outer_(std::exchange(innermost, this)) {
  memory_.noted_ = 0;
  memory_.left_out_ = false;
  if (!memory_.kept_.is_empty()) keeps_.emplace(kKeepingKey);
}
ReplayMemory::Scope::~Scope() {
  innermost = outer_;
  memory_.last_.reset();
  memory_.kept_.end_pass();
}

bool ReplayMemory::is_running() { return innermost != nullptr; }

std::shared_ptr<const void> ReplayMemory::remembered(const void* owner, std::shared_ptr<const void> now) {
  return ask(innermost, owner, std::move(now));
}

// A region inside another one may run for the first time in the second run of that one, which then knows.
std::shared_ptr<const void> ReplayMemory::ask(Scope* scope, const void* owner,
                                              std::shared_ptr<const void> now) {
  if (scope == nullptr) return now;
  auto& values = scope->memory_.values_;
  const auto found = values.find(owner);
  if (found != values.end()) return found->second;
  std::shared_ptr<const void> value = ask(scope->outer_, owner, std::move(now));
  values.emplace(owner, value);
  return value;
}

bool ReplayMemory::result_is_unread() {
  if (innermost == nullptr) return false;
  ReplayMemory& memory = innermost->memory_;
  const bool is_unread = memory.unread_ == memory.noted_;
  memory.left_out_ |= is_unread;
  return is_unread;
}

void ReplayMemory::note_last_product() {
  if (innermost == nullptr) return;
  ReplayMemory& memory = innermost->memory_;
  memory.calls_before_ = memory.kept_.calls();
}

void ReplayMemory::note_result(const at::Tensor& result) {
  if (innermost == nullptr) return;
  ReplayMemory& memory = innermost->memory_;
  ++memory.noted_;
  memory.last_ = result.is_inference() ? at::Tensor() : result;  // those have no version
  if (memory.last_.defined()) memory.last_version_ = result._version();
}

bool ReplayMemory::is_last(const Tensors& results) const {
  return results.size() == 1 && last_.defined() && results.front().is_same(last_) &&
         last_._version() == last_version_;
}

void ReplayMemory::end_first_run(const Tensors& results) {
  if (is_last(results)) {
    unread_ = noted_ - 1;
    kept_.let_go_from(calls_before_);  // the second run leaves that product out
  }
  kept_.end_first_run();
}

bool ReplayMemory::end_second_run(const Tensors& results) const {
  kept_.end_second_run();
  return !left_out_ || is_last(results);
}

// What a device's kernel calls in its turn is part of it and not kept.
void ReplayMemory::run_kept(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                            torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(kKeepingKey);
  run_kept(innermost, {op, keys, *stack});
}

void ReplayMemory::run_alias(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(kKeepingKey);
  const OperatorCall call{op, keys, *stack};
  const at::Tensor from = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  call.run();
  if (from.is_inference() || c10::InferenceMode::is_enabled()) return;
  const c10::IValue& result = stack->back();
  const Tensors made = result.isTensor() ? Tensors{result.toTensor()} : result.toTensorVector();
  for (const at::Tensor& tensor : made) {
    tensor.unsafeGetTensorImpl()->set_version_counter(from.unsafeGetTensorImpl()->version_counter());
  }
}

void ReplayMemory::run_addition(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(kKeepingKey);
  const OperatorCall call{op, keys, *stack};
  const at::Tensor changed = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  // What inference mode changes has another version than before and is an error.
  Scope* scope = c10::InferenceMode::is_enabled() ? nullptr : innermost;
  for (; scope != nullptr; scope = scope->outer_) {
    scope->memory_.kept_.copy_before_change(changed);
  }
  call.run();
}

// A region inside another one may run for the first time in the second run of that one, which then has the results. Those of
// inference mode have no version by which a change in place could be seen, and no gradient.
void ReplayMemory::run_kept(Scope* scope, const OperatorCall& call) {
  if (scope == nullptr || c10::InferenceMode::is_enabled()) return call.run();
  KeptResults& kept = scope->memory_.kept_;
  const auto further_out = [&] { run_kept(scope->outer_, call); };
  const std::optional<size_t> index = kept.index_of(call.op);
  if (!index) return further_out();
  if (!kept.is_second()) return kept.keep(*index, call, further_out);
  if (!kept.hand_out(*index, call)) further_out();
}

at::Tensor unread_values(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::Tensor one = at::full({1}, std::numeric_limits<double>::quiet_NaN(), options);
  return at::empty({0}, options).set_(one.storage(), 0, sizes, std::vector<int64_t>(sizes.size(), 0));
}

bool region_is_running() { return ReplayMemory::is_running(); }

std::shared_ptr<const void> remembered(const void* owner, std::shared_ptr<const void> now) {
  return ReplayMemory::remembered(owner, std::move(now));
}

}  // namespace pacer::detail
