// The part of an allocator that hands everything on to another one which not every version of LibTorch has.
#pragma once

#include <utility>

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/version.h>

namespace pacer::testing {

class ForwardingAllocator : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
 public:
  explicit ForwardingAllocator(CUDAAllocator& caching) : caching_(caching) {}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  void attachOomRejectionObserver(c10::cuda::CUDACachingAllocator::OomRejectionObserver observer) override {
    caching_.attachOomRejectionObserver(std::move(observer));
  }
#endif

 protected:
  CUDAAllocator& caching_;
};

}  // namespace pacer::testing
