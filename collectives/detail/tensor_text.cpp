#include <pacer/collectives/detail/tensor_text.h>

#include <vector>

#include <pacer/core/error.h>

namespace pacer::detail {

std::string tensor_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  const std::string text = concatenate(tensor.scalar_type(), ' ', tensor.sizes());
  if (tensor.layout() != at::kStrided) return concatenate(text, ", ", tensor.layout());
  if (tensor.is_contiguous()) return text;
  std::vector<int64_t> strides = tensor.strides().vec();
  for (size_t i = 0; i < strides.size(); ++i) {
    if (tensor.sizes()[i] == 1) strides[i] = 1;
  }
  return concatenate(text, ", strides ", at::IntArrayRef(strides));
}

}  // namespace pacer::detail
