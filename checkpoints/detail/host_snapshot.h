// Copies of tensors in host memory, which is kept from one snapshot to the next: training goes on with the
// originals while the copies are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <pacer/checkpoints/detail/checkpoint_save.h>

namespace pacer::detail {

class HostSnapshot {
 public:
  // The values as they are now, each dense, by the same names. What lies on a GPU is copied to page-locked
  // memory, all of it at the link's speed, and waited for once. The next call writes to the same memory.
  TensorsByFile take(const TensorsByFile& files);

 private:
  // Memory in blocks, from which tensors are cut one after the other.
  struct Arena {
    explicit Arena(bool is_page_locked) : is_page_locked(is_page_locked) {}
    // Cuts a tensor of that shape and dtype from a block with room, or from a new one for up to `total`
    // bytes.
    at::Tensor cut(const at::Tensor& like, int64_t total);

    bool is_page_locked;
    std::vector<at::Tensor> blocks;  // of bytes
    size_t block = 0;                // the next tensor comes from it, or from one behind it
    int64_t used = 0;                // bytes of it
  };

  Arena pageable_{false}, page_locked_{true};
};

}  // namespace pacer::detail
