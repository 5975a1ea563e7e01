// A tensor as it was when somebody saw it: whether what is there now is the same one, and nobody has written
// to it since. Comparing takes nanoseconds. The tensor is not kept, but its address is, so that no other one
// can take that meanwhile.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

namespace pacer::detail {

class SeenTensor {
 public:
  SeenTensor() : SeenTensor(at::Tensor()) {}  // nothing was there
  explicit SeenTensor(const at::Tensor& tensor)
      : tensor_(tensor.getIntrusivePtr()), version_(version_of(tensor)) {}

  bool was_defined() const { return tensor_._unsafe_get_target() != at::Tensor().unsafeGetTensorImpl(); }
  // Writes count where LibTorch counts their versions: those of its operators and of pacer's optimizers.
  bool is_unchanged(const at::Tensor& now) const {
    return now.unsafeGetTensorImpl() == tensor_._unsafe_get_target() && version_of(now) == version_;
  }

 private:
  // Tensors of inference mode have none.
  static int64_t version_of(const at::Tensor& tensor) {
    return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
  }

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  int64_t version_;
};

}  // namespace pacer::detail
