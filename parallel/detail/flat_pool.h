// Flat memory that is used again and again by pieces of mostly one size, so that a step allocates nothing.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace pacer::detail {

class FlatPool {
 public:
  // Returns memory for so many elements, with dtype and device of `like`; its contents are arbitrary.
  at::Tensor take(int64_t elements, const at::Tensor& like) {
    const auto fits = [&](const at::Tensor& memory) {
      return memory.numel() == elements && memory.scalar_type() == like.scalar_type();
    };
    const auto found = std::find_if(free_.begin(), free_.end(), fits);
    if (found == free_.end()) {
      free_.clear();  // what nobody wants any more goes before more is asked for
      return at::empty({elements}, like.options().requires_grad(false));
    }
    at::Tensor memory = std::move(*found);
    free_.erase(found);
    return memory;
  }
  // Gives what is free back to LibTorch.
  void clear() { free_.clear(); }
  // On CUDA whoever takes it next uses the same stream, or waits for it.
  void give_back(at::Tensor memory) { free_.push_back(std::move(memory)); }

 private:
  std::vector<at::Tensor> free_;
};

}  // namespace pacer::detail
