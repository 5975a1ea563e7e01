// Where the elements of several tensors lie in flat memory that W ranks share out in equal parts. Tensors lie
// one behind the other, each at a multiple of 128 elements; rank k owns elements [k N/W, (k + 1) N/W) of the
// N, which are padded to a multiple of 128 W. So a part may begin and end anywhere in a tensor, and no
// dimension has to be divisible by anything. Where pieces of tensors are asked for that are not to be cut, N
// is padded to a multiple of W pieces, and a tensor that a bound would cut begins at a multiple of a piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pacer {

class ShardLayout {
 public:
  // `counts`: elements of the tensors, >= 0, in order. `ranks` >= 1. `piece`: bounds of parts cut a tensor at
  // multiples of so many of its elements only; 1, or a multiple of 128.
  ShardLayout(const std::vector<int64_t>& counts, int ranks, int64_t piece = 1);

  // The elements of the flat memory, and those of each rank's part.
  int64_t elements() const { return elements_; }
  int64_t part_elements() const { return elements_ / ranks_; }
  // Where the tensor begins in flat memory.
  int64_t begin(size_t tensor) const { return begins_[tensor]; }
  // Rank r owns the tensor's elements from bounds[r] to bounds[r + 1] - 1; see ParameterRange.
  std::vector<int64_t> bounds(size_t tensor) const;

 private:
  int ranks_;
  std::vector<int64_t> counts_, begins_;
  int64_t elements_ = 0;
};

}  // namespace pacer
