// What paging asks of a device: memory of its own, copies in queues beside the one of the kernels, and events
// between queues. A GPU has it, and so has a simulated one in tests, whose copies are late on purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include <c10/core/Device.h>

namespace pacer::detail {

// Work in a queue runs in its order; between queues only events order it.
enum class PageQueue {
  update,  // the device's current stream
  load,    // copies to the device
  store,   // copies from it
};

class PageDevice {
 public:
  virtual ~PageDevice() = default;

  // Zeros, which the device copies from and to. Throws DeviceError where there is none left.
  virtual std::shared_ptr<void> host_memory(int64_t bytes) = 0;
  // Memory of the device beside LibTorch's allocator: what is freed is the driver's again. Null where there
  // is none left.
  virtual std::shared_ptr<void> device_memory(int64_t bytes) = 0;
  // What the driver has left of the device's memory.
  virtual int64_t free_bytes() const = 0;

  // These enqueue. An event is a small number; waiting for one that was never recorded waits for nothing.
  virtual void copy(PageQueue queue, void* to, const void* from, int64_t bytes) = 0;
  virtual void record(PageQueue queue, size_t event) = 0;
  virtual void wait(PageQueue queue, size_t event) = 0;
  // Calls `enqueue`, which enqueues kernels into the queue of updates.
  virtual void update(const std::function<void()>& enqueue) = 0;
  // The host waits until the queue, load or store, is empty.
  virtual void synchronize(PageQueue queue) = 0;

  // From now on `make_room` is called where LibTorch's allocator is about to ask the driver for memory of
  // this device, by whichever thread that is and while it holds the allocator's lock: it must not allocate
  // device memory of LibTorch's. An empty function ends that.
  virtual void watch_pressure(std::function<void()> make_room) = 0;
};

// Throws InvalidArgument for a device that is no GPU.
std::unique_ptr<PageDevice> make_page_device(c10::Device device);

}  // namespace pacer::detail
