// Operators that regions keep (kept_operators.h), as LibTorch's dispatcher knows them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace pacer::detail {

struct KeptOperator {
  c10::OperatorHandle handle;
  // The argument that says whether attention gives its log-sum-exp, which only a pass with a graph asks for.
  std::optional<size_t> log_sumexp;
  bool is_random = false;  // draws numbers
};

struct OperatorList {
  std::vector<std::string> names;
  std::vector<KeptOperator> operators;   // in the order of the names
  mutable std::atomic<int64_t> kept{0};  // calls whose results were kept, of all regions
};

// A key of the dispatcher between autograd and the kernels of devices. Kept operators have a kernel there, which runs in
// regions that keep something and nowhere else; all other operators pass through.
constexpr c10::DispatchKey kKeepingKey = c10::DispatchKey::Fake;

// Whether this thread is in a region that keeps results, so that a layer must not write over those of its operators.
inline bool region_keeps_results() {
  return c10::impl::tls_is_dispatch_key_included(kKeepingKey) &&
         !c10::impl::tls_is_dispatch_key_excluded(kKeepingKey);
}

// See KeptOperators for what it throws. Null for no name.
std::shared_ptr<const OperatorList> checked_operators(const std::vector<std::string>& names);

}  // namespace pacer::detail
