// The operations of an NCCL communicator on its stream: each between two CUDA events, where the caller's
// stream stood when it was started and where the operation is done; and the thread that keeps their
// deadlines.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/detail/nccl_comm.h>

struct CUevent_st;
struct CUstream_st;

namespace pacer::detail {

// Events without timing, of one device, in a pool, because making one costs more than a small operation. Any
// thread.
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
  // Only the watching thread uses these.
  bool is_over_ = false;
  bool has_started_ = false;
  Clock::time_point started_;
};

// Why the operations under way cannot end any more, or nothing. May block.
using NcclTrouble = std::function<std::optional<std::string>()>;

// The deadlines of operations, kept by a thread, as the host never waits for one.
//
// The clock of an operation runs while the host is enqueueing it (making connections at first use can hang)
// and then from when the caller's stream has come to it: time that this rank's own computation takes before
// is not held against the operation. It runs on while the operation waits for earlier ones of this
// communicator and for the other ranks.
class NcclWatchdog : public std::enable_shared_from_this<NcclWatchdog> {
 public:
  static std::shared_ptr<NcclWatchdog> start(std::shared_ptr<NcclComm> comm, NcclTrouble trouble);
  NcclWatchdog(std::shared_ptr<NcclComm> comm, NcclTrouble trouble);
  NcclWatchdog(const NcclWatchdog&) = delete;

  // Before the first call that can block. Kept until it is done or, after a failure, until the abort is.
  void add(std::shared_ptr<NcclOperation> operation);
  // Whether all operations were done within `limit`.
  bool wait_idle(std::chrono::milliseconds limit);
  // Ends the thread, waiting for it only so long.
  void stop(std::chrono::milliseconds limit) noexcept;

 private:
  using Clock = NcclOperation::Clock;
  using Operations = std::vector<std::shared_ptr<NcclOperation>>;
  struct Inquiry;

  void run();
  bool sleep(Operations& watched);
  void watch(const Operations& watched);
  void forget_over();
  void ask_about_trouble();

  const std::shared_ptr<NcclComm> comm_;
  const NcclTrouble trouble_;
  std::shared_ptr<Inquiry> inquiry_;
  Clock::time_point last_asked_;

  std::mutex mutex_;  // for what follows
  std::condition_variable changed_;
  Operations operations_;
  bool is_stopping_ = false;
  bool has_stopped_ = false;
};

}  // namespace pacer::detail
