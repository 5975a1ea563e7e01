// Which of a list of tensors are defined: nodes of a graph take and give defined tensors only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

class DefinedMask {
 public:
  DefinedMask() = default;
  explicit DefinedMask(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) is_defined_.push_back(tensor.defined());
  }

  std::vector<at::Tensor> compact(std::vector<at::Tensor> tensors) const {
    std::vector<at::Tensor> defined;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (is_defined_[i]) defined.push_back(std::move(tensors[i]));
    }
    return defined;
  }

  // The whole list again, from what there is for its defined tensors.
  template <class T>
  std::vector<T> expand(const std::vector<T>& defined) const {
    std::vector<T> all(is_defined_.size());
    size_t next = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      if (is_defined_[i]) all[i] = defined[next++];
    }
    return all;
  }

  bool operator==(const DefinedMask& other) const { return is_defined_ == other.is_defined_; }
  size_t size() const { return is_defined_.size(); }

 private:
  std::vector<bool> is_defined_;
};

}  // namespace pacer::detail
