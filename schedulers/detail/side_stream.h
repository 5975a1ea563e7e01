// Work on a GPU beside the current stream.
#pragma once

#include <functional>
#include <memory>

#include <c10/core/Device.h>

namespace pacer::detail {

class SideStream {
 public:
  virtual ~SideStream() = default;

  // Calls f, now, with the side stream as the current one of this thread; it comes after what stands on the
  // caller's.
  virtual void run(const std::function<void()>& f) = 0;
  // The current stream waits for what run() has enqueued.
  virtual void join() = 0;
};

// Null for a device that has no streams.
std::unique_ptr<SideStream> make_side_stream(c10::Device device);

}  // namespace pacer::detail
