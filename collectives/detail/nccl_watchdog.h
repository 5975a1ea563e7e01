// The deadlines of an NCCL communicator's operations, kept by a thread, as the host never waits for one.
//
// The clock of an operation runs while the host is enqueueing it (making connections at first use can hang)
// and then from when the caller's stream has come to it: time that this rank's own computation takes before
// is not held against the operation. It runs on while the operation waits for earlier ones of this
// communicator and for the other ranks.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <pacer/collectives/detail/nccl_comm.h>
#include <pacer/collectives/detail/nccl_operation.h>

namespace pacer::detail {

// Why the operations under way cannot end any more, or nothing. May block.
using NcclTrouble = std::function<std::optional<std::string>()>;

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
