#include <pacer/modules/detail/replay_memory.h>

#include <utility>

#include <pacer/modules/replayed.h>

namespace pacer::detail {
namespace {

thread_local ReplayMemory::Scope* innermost = nullptr;

}  // namespace

ReplayMemory::Scope::Scope(ReplayMemory& memory) : memory_(memory), outer_(std::exchange(innermost, this)) {}
ReplayMemory::Scope::~Scope() { innermost = outer_; }

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

bool region_is_running() { return ReplayMemory::is_running(); }

std::shared_ptr<const void> remembered(const void* owner, std::shared_ptr<const void> now) {
  return ReplayMemory::remembered(owner, std::move(now));
}

}  // namespace pacer::detail
