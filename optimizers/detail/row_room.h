// Memory in which tensors grow by rows: where it is full, there is new memory with room for as many rows again.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

namespace pacer::detail {

class RowRoom {
 public:
  // [rows of both, ...], contiguous: the rows of `tensor`, and then those of `more`, of the same dtype, device and
  // further dimensions. In the memory of `tensor` where that is from here, `tensor` has all of the rows in use there,
  // and there is room.
  at::Tensor extended(const at::Tensor& tensor, const at::Tensor& more);
  // The same with so many rows of zeros.
  at::Tensor extended(const at::Tensor& tensor, int64_t zeros);

 private:
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t elements;  // in use
  };
  at::Tensor with_room(const at::Tensor& tensor, int64_t more);

  std::vector<Memory> made_;
};

}  // namespace pacer::detail
