#include <pacer/hooks/detail/missed_parameters.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

#include <pacer/collectives/detail/gradient_checks.h>
#include <pacer/hooks/detail/model_facts.h>

namespace pacer::detail {

void check_all_reached(const SessionParts& parts, const std::vector<at::Tensor>& joined) {
  const auto is_missed = [&](const at::Tensor& parameter) {
    return parameter.requires_grad() && !parameter.grad().defined() &&
           parts.released.count(parameter.unsafeGetTensorImpl()) == 0;
  };
  bool misses = false;
  for (const auto& group : parts.optimizer().param_groups()) {
    misses = misses || std::any_of(group.params().begin(), group.params().end(), is_missed);
  }
  if (!misses) return;                   // names cost more
  std::unordered_set<const void*> zero;  // where a gradient that is not there is one of zero, or none
  for (const at::Tensor& parameter : joined) zero.insert(parameter.unsafeGetTensorImpl());
  Progress window = parts.progress;
  window.micro_step = 0;
  for (const at::Tensor& parameter : parts.unused(window)) zero.insert(parameter.unsafeGetTensorImpl());
  const SessionOptimizer* own = parts.session_optimizer();
  if (own != nullptr && own->gradient_scope() != GradientScope::world) {
    for (const at::Tensor& parameter : own->local_parameters()) zero.insert(parameter.unsafeGetTensorImpl());
  }
  std::vector<std::string> missed;
  size_t count = 0;
  for (const auto& [name, parameter] : named_optimizer_parameters(parts)) {
    if (!parameter.requires_grad()) continue;
    ++count;
    if (is_missed(parameter) && zero.count(parameter.unsafeGetTensorImpl()) == 0) missed.push_back(name);
  }
  require_all_reached(missed, count);
}

}  // namespace pacer::detail
