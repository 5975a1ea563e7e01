#include <pacer/modules/detail/replay_memory.h>

#include <limits>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <pacer/modules/replayed.h>

namespace pacer::detail {
namespace {

thread_local ReplayMemory::Scope* innermost = nullptr;

}  // namespace

ReplayMemory::Scope::Scope(ReplayMemory& memory) : memory_(memory), outer_(std::exchange(innermost, this)) {
  memory_.noted_ = 0;
  memory_.left_out_ = false;
}
ReplayMemory::Scope::~Scope() {
  innermost = outer_;
  memory_.last_.reset();
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
  if (is_last(results)) unread_ = noted_ - 1;
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
