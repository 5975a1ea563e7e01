#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <pacer/schedulers/detail/side_stream.h>

namespace pacer::detail {
namespace {

class CudaSideStream final : public SideStream {
 public:
  // Of LibTorch's pool: cached memory may refer to the stream after this has gone.
  explicit CudaSideStream(c10::Device device)
      : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  void run(const std::function<void()>& f) override {
    before_.record(c10::cuda::getCurrentCUDAStream(stream_.device_index()));
    before_.block(stream_);
    const c10::cuda::CUDAStreamGuard guard(stream_);
    f();
  }

  void join() override {
    after_.record(stream_);
    after_.block(c10::cuda::getCurrentCUDAStream(stream_.device_index()));
  }

 private:
  const c10::cuda::CUDAStream stream_;
  at::cuda::CUDAEvent before_, after_;
};

}  // namespace

std::unique_ptr<SideStream> make_side_stream(c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  return std::make_unique<CudaSideStream>(device);
}

}  // namespace pacer::detail
