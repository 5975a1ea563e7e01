// An NCCL communicator that can be ended at any time: set-up with a deadline, calls
// that never block for good, one failure that all threads see, and an abort that is left behind when it
// hangs. It knows nothing of tensors, streams or deadlines of operations.
//
// The communicator is non-blocking in NCCL's sense: calls return while a thread of NCCL goes on, and
// enqueue() polls. Only so may another thread call ncclCommAbort while the first use of a connection waits
// for a peer that is gone; with a blocking one the abort would free what the waiting call still uses.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <c10/core/Device.h>

#include <pacer/collectives/detail/transport.h>

struct ncclComm;

namespace pacer::detail {

// The bytes of an ncclUniqueId.
using NcclId = std::array<char, 128>;

// Calls NCCL and returns the ncclResult_t. Must not throw.
using NcclCall = std::function<int(ncclComm*)>;

class NcclComm : public std::enable_shared_from_this<NcclComm> {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  // How long an abort is waited for before it is left to itself.
  static constexpr Milliseconds kAbortLimit{5000};

  // Joins the group of that id. Throws TransportTimeout, or Error with NCCL's words.
  static std::shared_ptr<NcclComm> create(const NcclId& id, int rank, int world_size, c10::Device device,
                                          Milliseconds timeout);
  NcclComm(int rank, int world_size, c10::Device device)
      : rank_(rank), world_size_(world_size), device_(device) {}
  NcclComm(const NcclComm&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  c10::Device device() const { return device_; }

  // Calls `call` and returns when NCCL has put all of it on its streams. One thread at a time. Throws the
  // failure, at the latest soon after fail() by another thread.
  void enqueue(const char* name, const NcclCall& call);
  // Fails where NCCL knows of an error; never blocks.
  void poll() noexcept;

  // The first failure counts; it starts the abort and does not wait for it.
  void fail(const std::string& reason, bool is_timeout) noexcept;
  bool has_failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  // Throws the failure, if there is one: TransportTimeout or Error.
  void check() const;
  // Whether the abort, or close(), is done; waits for it.
  bool wait_ended(Milliseconds limit) noexcept;
  // The same without a limit, for threads that nobody waits for.
  void wait_ended();

  // Ends a communicator that has nothing under way, as NCCL wants it; afterwards it counts as failed. Returns
  // when that is done or `limit` is over.
  void close(Milliseconds limit) noexcept;

 private:
  void initialize(const NcclId& id);
  void settle(const char* name);
  bool claim(const std::string& reason, bool is_timeout);
  void start_ending(void (NcclComm::*end)());
  void abort_now();
  void finalize_now();
  void set_ended();

  const int rank_;
  const int world_size_;
  const c10::Device device_;
  std::timed_mutex calls_;  // held during every call of NCCL; NCCL is not thread-safe per communicator
  ncclComm* comm_ = nullptr;

  mutable std::mutex mutex_;  // for what follows
  std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  std::string reason_;
  bool is_timeout_ = false;
  bool is_ready_ = false;
  bool is_known_ = false;  // NCCL has handed out comm_, so that there is something to abort
  bool is_ending_ = false;
  bool is_ended_ = false;
};

// One sentence with NCCL's words for the last error.
std::string nccl_error_text(const char* name, int result);

}  // namespace pacer::detail
