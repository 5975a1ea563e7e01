// Memory of a GPU that runs out: an allocator of LibTorch's that stands before the caching one, and counts
// what that is asked for.
#include "support/failing_memory.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "device/forwarding_allocator.h"

namespace pacer::testing {
namespace {
namespace failing_device_memory {

using namespace c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::cuda::MempoolId_t;

// Hands everything on but what is to fail.
class DeviceMemory final : public ForwardingAllocator {
 public:
  using ForwardingAllocator::ForwardingAllocator;

  c10::DataPtr allocate(size_t bytes) override {
    refuse(bytes);
    return caching_.allocate(bytes);
  }
  void* raw_alloc(size_t bytes) override {
    refuse(bytes);
    return caching_.raw_alloc(bytes);
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    refuse(bytes);
    return caching_.raw_alloc_with_stream(bytes, stream);
  }

  void raw_delete(void* memory) override { caching_.raw_delete(memory); }
  c10::DeleterFnPtr raw_deleter() const override { return caching_.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    caching_.copy_data(to, from, bytes);
  }
  void init(int devices) override { caching_.init(devices); }
  bool initialized() override { return caching_.initialized(); }
  double getMemoryFraction(DeviceIndex device) override { return caching_.getMemoryFraction(device); }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    caching_.setMemoryFraction(fraction, device);
  }
  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return caching_.getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { caching_.enable(value); }
  bool isEnabled() const override { return caching_.isEnabled(); }
  void emptyCache(MempoolId_t pool) override { caching_.emptyCache(pool); }
  void cacheInfo(DeviceIndex device, size_t* largest) override { caching_.cacheInfo(device, largest); }
  void* getBaseAllocation(void* memory, size_t* size) override {
    return caching_.getBaseAllocation(memory, size);
  }
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    caching_.recordStream(data, stream);
  }
  DeviceStats getDeviceStats(DeviceIndex device) override { return caching_.getDeviceStats(device); }
  void resetAccumulatedStats(DeviceIndex device) override { caching_.resetAccumulatedStats(device); }
  void resetPeakStats(DeviceIndex device) override { caching_.resetPeakStats(device); }
  SnapshotInfo snapshot(MempoolId_t pool, bool traces) override { return caching_.snapshot(pool, traces); }
  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    caching_.beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    caching_.endAllocateToPool(device, pool);
  }
  void releasePool(DeviceIndex device, MempoolId_t pool) override { caching_.releasePool(device, pool); }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    return caching_.getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> allocator) override {
    caching_.createOrIncrefPool(device, pool, std::move(allocator));
  }
  ShareableHandle shareIpcHandle(void* memory) override { return caching_.shareIpcHandle(memory); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return caching_.getIpcDevPtr(std::move(handle));
  }
  void recordHistory(bool enabled, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    caching_.recordHistory(enabled, recorder, most, when, clear, skipped);
  }
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    caching_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    caching_.attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex other) override {
    caching_.enablePeerAccess(device, other);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                          cudaStream_t stream, bool is_peer) override {
    return caching_.memcpyAsync(to, to_device, from, from_device, bytes, stream, is_peer);
  }
  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    return caching_.getCheckpointState(device, pool);
  }
  CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<AllocatorState> state) override {
    return caching_.setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return caching_.name(); }

 private:
  static void refuse(size_t bytes) {
    TORCH_CHECK_WITH(OutOfMemoryError, !FailingMemory::fails_now(), "CUDA out of memory. Tried to allocate ",
                     bytes, " bytes.");
  }
};

}  // namespace failing_device_memory
}  // namespace

void prepare_failing_memory() {
  static const bool is_installed = [] {
    using namespace c10::cuda::CUDACachingAllocator;
    at::globalContext().lazyInitDevice(at::kCUDA);
    static auto* const memory = new failing_device_memory::DeviceMemory(*get());  // outlives all tensors
    allocator = memory;
    return true;
  }();
  static_cast<void>(is_installed);
}

int64_t live_allocations() {
  const auto stats = c10::cuda::CUDACachingAllocator::get()->getDeviceStats(c10::cuda::current_device());
  return stats.allocation[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
}

}  // namespace pacer::testing
