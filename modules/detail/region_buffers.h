// Buffers of a module that its forward changes (running statistics, counters): a second run finds them as the
// first one did, and what it does to them is forgotten.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer::detail {

class RegionBuffers {
 public:
  // Before the first run: copies all buffers but those of weights in 4 bits. After it: keeps the copies of
  // those that it changed.
  explicit RegionBuffers(const torch::nn::Module& module);
  void keep_changed();

  // The name of a buffer that has changed since, by somebody else; empty for none.
  std::string changed_by_others() const;

  // The buffers as they were before the first run, until the end.
  class AsBefore {
   public:
    explicit AsBefore(const RegionBuffers& buffers);
    AsBefore(const AsBefore&) = delete;
    ~AsBefore();

   private:
    void exchange(const std::vector<at::Tensor>& values) const;

    const RegionBuffers& buffers_;
    std::vector<at::Tensor> now_;
  };

 private:
  struct Buffer {
    std::string name;
    at::Tensor tensor;
    at::Tensor before;  // undefined for one that the first run did not change
    int64_t version;
  };
  std::vector<Buffer> buffers_;
};

}  // namespace pacer::detail
