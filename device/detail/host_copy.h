// A copy of a tensor on the host that may still be on its way from a GPU.
#pragma once

#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

class HostCopy {
 public:
  virtual ~HostCopy() = default;

  // Neither waits nor lets anything wait.
  virtual bool arrived() const = 0;
  virtual void wait() const = 0;
  // On the CPU. To be read once arrived() was true or wait() has returned.
  const at::Tensor& value() const { return value_; }

 protected:
  explicit HostCopy(at::Tensor value) : value_(std::move(value)) {}

 private:
  at::Tensor value_;
};

// From a GPU: enqueues the copy on the current stream and does not wait for it; what is enqueued on that
// stream afterwards may overwrite the tensor. From the CPU: what the tensor holds now.
std::unique_ptr<HostCopy> start_host_copy(const at::Tensor& tensor);

}  // namespace pacer::detail
