#include "pinned_copies.h"

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace paging_bench {
namespace {

class CopiesOnStreams final : public PinnedCopies {
 public:
  explicit CopiesOnStreams(int64_t bytes) {
    const auto pinned = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
    const auto on_gpu = at::TensorOptions().dtype(at::kByte).device(at::kCUDA);
    host_from_ = at::zeros({bytes}, pinned), host_to_ = at::zeros({bytes}, pinned);
    gpu_from_ = at::zeros({bytes}, on_gpu), gpu_to_ = at::zeros({bytes}, on_gpu);
  }

  void run() override {
    {
      const c10::cuda::CUDAStreamGuard guard(to_gpu_);
      gpu_to_.copy_(host_from_, /*non_blocking=*/true);
    }
    {
      const c10::cuda::CUDAStreamGuard guard(from_gpu_);
      host_to_.copy_(gpu_from_, /*non_blocking=*/true);
    }
    to_gpu_.synchronize();
    from_gpu_.synchronize();
  }

 private:
  c10::cuda::CUDAStream to_gpu_ = c10::cuda::getStreamFromPool(), from_gpu_ = c10::cuda::getStreamFromPool();
  at::Tensor host_from_, host_to_, gpu_from_, gpu_to_;
};

}  // namespace

std::unique_ptr<PinnedCopies> make_pinned_copies(int64_t bytes) {
  return std::make_unique<CopiesOnStreams>(bytes);
}

}  // namespace paging_bench
