// What the bus between host and GPU can do: pinned copies both ways at once.
#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace paging_bench {

// Copies of so many bytes each way, with memory of their own. Throws pacer::Unavailable in a build without
// CUDA.
class PinnedCopies {
 public:
  virtual ~PinnedCopies() = default;
  // Both at once, on two streams; returns when both are done.
  virtual void run() = 0;
};
std::unique_ptr<PinnedCopies> make_pinned_copies(int64_t bytes);

}  // namespace paging_bench
