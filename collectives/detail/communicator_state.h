// What the public Communicator holds: transports, counters, and what happened to them. Every operation goes
// through start(), every failure through fail(), so that one failed operation fails all later ones.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/agreement_message.h>
#include <pacer/collectives/detail/operation_queue.h>
#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

class CommunicatorState : public std::enable_shared_from_this<CommunicatorState> {
 public:
  CommunicatorState(Connection connection, CommunicatorOptions options)
      : connection_(std::move(connection)), options_(std::move(options)) {}
  ~CommunicatorState();

  const Connection& connection() const { return connection_; }
  const CommunicatorOptions& options() const { return options_; }
  std::chrono::milliseconds timeout_of(const CollectiveOptions& options) const {
    return options.timeout().value_or(options_.timeout());
  }

  // Counts a call that sends `bytes` from here, and starts it.
  Work start(const char* operation, int64_t bytes, OperationParts parts);
  // The same of a message on the host, which is independent of the operations above.
  Work start_message(const char* operation, int64_t bytes, const NextPart& message);
  // Refuses, on every rank, calls that differ between the ranks.
  void compare(CallRecord record, std::chrono::milliseconds timeout);

  // Records the failure of an operation, ends all others, asks who is still there, and throws.
  [[noreturn]] void fail(const std::string& operation, int64_t sequence, const std::string& cause);
  void leave(const std::string& reason) noexcept;
  void abort() noexcept;
  void check();
  bool has_failed() const;

  void set_step(int64_t step);
  void set_phase(const std::string& phase);
  std::vector<Traffic> traffic() const;

 private:
  int64_t count(const char* operation, int64_t bytes);
  Work pending(const char* operation, int64_t bytes,
               const std::function<std::shared_ptr<QueuedOperation>()>& start);

  const Connection connection_;
  const CommunicatorOptions options_;
  mutable std::mutex mutex_;
  std::mutex failing_;  // one thread at a time finds out what happened
  int64_t sequence_ = 0;
  int64_t collectives_ = 0;  // compared calls
  int64_t step_ = -1;
  std::string phase_;
  std::vector<Traffic> traffic_;
  std::shared_ptr<const CommunicationError> failure_;
  OperationQueue queue_;  // unused where the transport has a stream
};

// One operation, from its start to wait().
class PendingOperation {
 public:
  PendingOperation(std::shared_ptr<CommunicatorState> state, std::string operation, int64_t sequence,
                   std::shared_ptr<QueuedOperation> queued)
      : state_(std::move(state)),
        operation_(std::move(operation)),
        sequence_(sequence),
        queued_(std::move(queued)) {}

  void wait();
  bool is_done() { return queued_->is_done(); }

 private:
  std::shared_ptr<CommunicatorState> state_;
  std::string operation_;
  int64_t sequence_;
  std::shared_ptr<QueuedOperation> queued_;
};

}  // namespace pacer::detail
