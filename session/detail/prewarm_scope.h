// Puts back what a forward and backward pass changes: gradients, buffers of modules, random state.
#pragma once

#include <exception>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <pacer/device/detail/random_state.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/modules/detail/buffer_names.h>
#include <pacer/modules/detail/model_modules.h>

namespace pacer::detail {

// Gives a variable another value for a while.
template <class T>
class ScopedValue {
 public:
  ScopedValue(T& variable, T value)
      : variable_(variable), before_(std::exchange(variable, std::move(value))) {}
  ScopedValue(const ScopedValue&) = delete;
  ~ScopedValue() { variable_ = std::move(before_); }

 private:
  T& variable_;
  T before_;
};

class PrewarmScope {
 public:
  explicit PrewarmScope(SessionParts& parts) : device_(parts.device()), random_(get_random_state(device_)) {
    const auto codes = nf4_buffers(parts.model());  // no pass writes to them
    for (const auto& item : parts.model().named_buffers()) {
      const at::Tensor& buffer = item.value();
      if (!buffer.defined() || codes.count(buffer.unsafeGetTensorImpl()) != 0) continue;
      const bool is_statistic = is_running_statistic(item.key());
      buffers_.push_back({buffer, buffer.detach().clone(), buffer._version(), is_statistic});
    }
    std::vector<at::Tensor> parameters = parts.model().parameters();
    for (const at::Tensor& parameter : all_optimizer_parameters(parts)) parameters.push_back(parameter);
    std::unordered_set<const void*> seen;
    for (const at::Tensor& parameter : parameters) {
      if (!parameter.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      gradients_.emplace_back(parameter, std::exchange(parameter.mutable_grad(), at::Tensor()));
    }
  }
  PrewarmScope(const PrewarmScope&) = delete;
  ~PrewarmScope() {
    try {
      const at::NoGradGuard no_grad;
      for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = std::move(gradient);
      for (Buffer& buffer : buffers_) {
        // To write counts as a change, after which the ranks keep the buffer the same in every step.
        if (buffer.is_statistic || buffer.tensor._version() != buffer.version)
          buffer.tensor.copy_(buffer.value);
      }
      set_random_state(device_, random_);
    } catch (const std::exception& error) {  // of a device that has failed
      TORCH_WARN("Session::prewarm could not put back what its passes changed: ", error.what());
    }
  }

 private:
  at::Device device_;
  RandomState random_;
  struct Buffer {
    at::Tensor tensor, value;
    int64_t version;    // before the passes
    bool is_statistic;  // kernels that write running statistics count no version
  };
  std::vector<Buffer> buffers_;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
};

}  // namespace pacer::detail
