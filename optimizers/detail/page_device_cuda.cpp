// Paging on a GPU: pinned host memory, memory of the device from the driver, two streams of copies, and the
// callback of LibTorch's allocator.
#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/page_device.h>

namespace pacer::detail {
namespace {

void require_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw DeviceError(
      concatenate("paging of optimizer state: ", what, " failed: ", cudaGetErrorString(status)));
}

class CudaPageDevice;

// Those that give memory back under pressure.
struct PressureWatch {
  std::mutex mutex;
  std::vector<CudaPageDevice*> devices;
};
PressureWatch& pressure_watch() {
  static auto* const watch = new PressureWatch;  // outlives every optimizer, static ones too
  return *watch;
}

void zero_host_memory(char* memory, int64_t bytes) {
  constexpr int64_t kShare = int64_t{16} << 20;
  at::parallel_for(0, bytes, kShare, [&](int64_t begin, int64_t end) {
    std::memset(memory + begin, 0, static_cast<size_t>(end - begin));
  });
}

class CudaPageDevice final : public PageDevice {
 public:
  explicit CudaPageDevice(c10::Device device) : device_(device) {
    const c10::cuda::CUDAGuard guard(device_);
    for (cudaStream_t& stream : copies_) {
      require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    }
  }
  CudaPageDevice(const CudaPageDevice&) = delete;
  CudaPageDevice& operator=(const CudaPageDevice&) = delete;
  // Errors are passed over: at the end of a process the driver may be gone already.
  ~CudaPageDevice() override {
    CudaPageDevice::watch_pressure(nullptr);
    for (cudaStream_t stream : copies_) {
      if (stream == nullptr) continue;
      (void)cudaStreamSynchronize(stream);
      (void)cudaStreamDestroy(stream);
    }
    for (cudaEvent_t event : events_) {
      if (event != nullptr) (void)cudaEventDestroy(event);
    }
    (void)cudaGetLastError();
  }

  std::shared_ptr<void> host_memory(int64_t bytes) override {
    const c10::cuda::CUDAGuard guard(device_);
    void* memory = nullptr;
    const cudaError_t status = cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocPortable);
    if (status != cudaSuccess) {
      (void)cudaGetLastError();
      throw DeviceError(
          concatenate("no ", bytes,
                      " bytes of pinned host memory for the optimizer's state: ", cudaGetErrorString(status),
                      "; raise the limit of the machine or container, or train fewer parameters"));
    }
    zero_host_memory(static_cast<char*>(memory), bytes);
    return {memory, [](void* own) {
              (void)cudaFreeHost(own);
              (void)cudaGetLastError();
            }};
  }

  std::shared_ptr<void> device_memory(int64_t bytes) override {
    const c10::cuda::CUDAGuard guard(device_);
    void* memory = nullptr;
    cudaError_t status = cudaMalloc(&memory, static_cast<size_t>(bytes));
    if (status == cudaErrorMemoryAllocation) {  // LibTorch may have memory that it does not use
      (void)cudaGetLastError();
      c10::cuda::CUDACachingAllocator::emptyCache();
      status = cudaMalloc(&memory, static_cast<size_t>(bytes));
    }
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      return nullptr;
    }
    require_cuda(status, "taking GPU memory");
    return {memory, [device = device_](void* own) {
              const c10::DeviceIndex before = current_device();
              (void)cudaSetDevice(device.index());
              (void)cudaFree(own);
              (void)cudaSetDevice(before);
              (void)cudaGetLastError();
            }};
  }

  int64_t free_bytes() const override {
    const c10::cuda::CUDAGuard guard(device_);
    size_t free = 0, total = 0;
    require_cuda(cudaMemGetInfo(&free, &total), "asking for free memory");
    return static_cast<int64_t>(free);
  }

  void copy(PageQueue queue, void* to, const void* from, int64_t bytes) override {
    require_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_of(queue)),
                 "a copy");
  }
  void record(PageQueue queue, size_t event) override {
    require_cuda(cudaEventRecord(event_of(event), stream_of(queue)), "recording an event");
  }
  void wait(PageQueue queue, size_t event) override {
    require_cuda(cudaStreamWaitEvent(stream_of(queue), event_of(event), 0), "waiting for an event");
  }
  void update(const std::function<void()>& enqueue) override { enqueue(); }
  void synchronize(PageQueue queue) override {
    require_cuda(cudaStreamSynchronize(stream_of(queue)), "a copy or the kernel before it");
  }

  void watch_pressure(std::function<void()> make_room) override {
    PressureWatch& watch = pressure_watch();
    const std::lock_guard<std::mutex> lock(watch.mutex);
    watch.devices.erase(std::remove(watch.devices.begin(), watch.devices.end(), this), watch.devices.end());
    make_room_ = std::move(make_room);
    if (make_room_) watch.devices.push_back(this);
  }
  // Under the watch's lock.
  void make_room() {
    const c10::cuda::CUDAGuard guard(device_);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream_of(PageQueue::update), &capture) != cudaSuccess ||
        capture != cudaStreamCaptureStatusNone) {
      (void)cudaGetLastError();
      return;
    }
    make_room_();
  }

 private:
  static c10::DeviceIndex current_device() {
    int device = 0;
    (void)cudaGetDevice(&device);
    return static_cast<c10::DeviceIndex>(device);
  }

  cudaStream_t stream_of(PageQueue queue) const {
    if (queue == PageQueue::update) return c10::cuda::getCurrentCUDAStream(device_.index()).stream();
    return copies_[queue == PageQueue::load ? 0 : 1];
  }

  cudaEvent_t event_of(size_t event) {
    if (event >= events_.size()) events_.resize(event + 1, nullptr);
    if (events_[event] == nullptr) {
      const c10::cuda::CUDAGuard guard(device_);
      require_cuda(cudaEventCreateWithFlags(&events_[event], cudaEventDisableTiming), "making an event");
    }
    return events_[event];
  }

  c10::Device device_;
  std::array<cudaStream_t, 2> copies_{};
  std::vector<cudaEvent_t> events_;
  std::function<void()> make_room_;
};

// Called for every block that the allocator does not find in its cache. Whether there is room afterwards the
// allocator learns from the driver, so the answer, that its cache got larger, is always no.
class MakeRoomForBlocks final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    PressureWatch& watch = pressure_watch();
    const std::lock_guard<std::mutex> lock(watch.mutex);
    if (watch.devices.empty()) return false;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // a graph of another thread is none of ours
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    for (CudaPageDevice* device : watch.devices) {
      try {
        device->make_room();
      } catch (const std::exception&) {
        // A device that failed says so to its owner's next call; the allocator goes on as if there were no
        // state.
      }
    }
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return false;
  }
};

}  // namespace

std::unique_ptr<PageDevice> make_page_device(c10::Device device) {
  require(!device.is_cpu(),
          "paged() is for parameters on a GPU; parameters on the CPU have their state in host memory anyway; "
          "leave out paged()");
  return std::make_unique<CudaPageDevice>(device);
}

}  // namespace pacer::detail

namespace c10 {
namespace {

using PacerMakeRoom = pacer::detail::MakeRoomForBlocks;

}  // namespace
REGISTER_FREE_MEMORY_CALLBACK(pacer_paged_state, PacerMakeRoom)
}  // namespace c10
