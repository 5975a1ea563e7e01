// One operation on a stream between two CUDA events: where the caller's stream stood when it was started, and
// where the operation is done. The events come from a pool, because making one costs more than a small
// operation.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

struct CUevent_st;
struct CUstream_st;

namespace pacer::detail {

// Events without timing, of one device. Any thread.
class CudaEventPool {
 public:
  explicit CudaEventPool(c10::Device device) : device_(device) {}
  CudaEventPool(const CudaEventPool&) = delete;
  ~CudaEventPool();

  // Throws DeviceError.
  CUevent_st* take();
  void give_back(CUevent_st* event) noexcept;

 private:
  const c10::Device device_;
  std::mutex mutex_;
  std::vector<CUevent_st*> free_;
};

// Throws Error where the stream is being captured into a CUDA graph: deadlines cannot watch over a replay.
void refuse_captured_stream(CUstream_st* stream, const char* name);

// Throws DeviceError in one sentence.
void make_stream_wait(CUstream_st* stream, CUevent_st* event, const char* name);

// Started by one thread, waited for by one, watched by another.
class NcclOperation {
 public:
  using Clock = std::chrono::steady_clock;

  // `name` outlives it.
  NcclOperation(const char* name, std::chrono::milliseconds timeout, std::vector<at::Tensor> tensors,
                std::shared_ptr<CudaEventPool> events);
  NcclOperation(const NcclOperation&) = delete;
  ~NcclOperation();

  const char* name() const { return name_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // The caller's stream: what stands there now comes before the operation.
  void record_start(CUstream_st* caller);
  // The operation's stream waits for it.
  void follow_caller(CUstream_st* stream) { make_stream_wait(stream, start_, name_); }
  // The operation is enqueued on `stream`, up to here.
  void record_end(CUstream_st* stream);
  // It will never be enqueued.
  void give_up() noexcept { phase_.store(Phase::given_up, std::memory_order_release); }

  // Never blocks. Throws DeviceError where CUDA has failed.
  bool is_done() const;

  // `stream` waits for the end. What is enqueued there later may use, or free and reuse, the tensors.
  void wait_on(CUstream_st* stream);
  // Lets go of the tensors: the operation is done or will never be.
  void release() noexcept;

  // For the watching thread. look() asks CUDA, and throws DeviceError where that has failed; is_over() is
  // what it found; age() is for how long the operation has been under way, as NcclWatchdog counts.
  void look(Clock::time_point now);
  bool is_over() const noexcept { return is_over_; }
  Clock::duration age(Clock::time_point now) const;

 private:
  enum class Phase { being_enqueued, enqueued, given_up };

  const char* const name_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point called_ = Clock::now();
  const std::shared_ptr<CudaEventPool> events_;
  CUevent_st* start_ = nullptr;
  CUevent_st* end_ = nullptr;
  CUstream_st* caller_ = nullptr;
  std::atomic<Phase> phase_{Phase::being_enqueued};
  std::mutex mutex_;
  std::vector<at::Tensor> tensors_;
  // Of the watching thread.
  bool is_over_ = false;
  bool has_started_ = false;
  Clock::time_point started_;
};

}  // namespace pacer::detail
