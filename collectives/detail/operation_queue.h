// Operations on host memory that consist of several messages, one after the other. They are started in the
// order in which they were called, on every rank, whoever waits for which of them and when: the second
// message of one comes before the first of the next. A thread sees to that, from the first such operation on.
// All messages of an operation, and the wait for those before it, share one deadline, which counts from its
// call.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

// Starts a message once the one before is through. Null where there is nothing to wait for.
using TransportCall = std::function<TransportWorkPtr(Transport&, Transport::Milliseconds timeout)>;

// What an operation consists of: at least one call, and what is left to do here when all are through; may be
// null.
struct TransportCalls {
  TransportCalls() = default;
  TransportCalls(TransportCall only) { calls.push_back(std::move(only)); }  // NOLINT: a call is an operation
  TransportCalls(std::vector<TransportCall> all, std::function<void()> last)
      : calls(std::move(all)), after(std::move(last)) {}

  std::vector<TransportCall> calls;
  std::function<void()> after;
};

// One operation on its way.
class QueuedOperation {
 public:
  QueuedOperation(std::shared_ptr<Transport> transport, TransportCalls calls, Transport::Milliseconds timeout)
      : transport_(std::move(transport)), calls_(std::move(calls)), timeout_(timeout) {}
  ~QueuedOperation();
  QueuedOperation(const QueuedOperation&) = delete;

  // On a transport with a stream: enqueues all calls, `after` included.
  void enqueue();
  // Returns when all is done, `after` included. Throws what went wrong.
  void wait();
  // Never blocks. True where wait() would return at once but for `after`, or throw.
  bool is_done();

 private:
  friend class OperationQueue;

  // Starts the next call.
  void start(Transport::Milliseconds limit) { work_ = calls_.calls[next_++](*transport_, limit); }
  // Starts the others.
  void run() noexcept;
  void fail(std::exception_ptr error) noexcept;
  bool is_simple() const { return calls_.calls.size() == 1; }
  Transport::Milliseconds time_left() const;
  TransportTimeout timed_out() const;

  const std::shared_ptr<Transport> transport_;
  TransportCalls calls_;
  const Transport::Milliseconds timeout_;
  const std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::now() + timeout_;
  size_t next_ = 0;            // call to start
  TransportWorkPtr work_;      // of the call that was started last; the caller's once is_started_
  bool is_started_ = false;    // all calls
  bool is_on_stream_ = false;  // several calls, enqueued from the start
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// The operations on one transport.
class OperationQueue {
 public:
  explicit OperationQueue(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}
  // Aborts the transport where operations are on their way.
  ~OperationQueue();
  OperationQueue(const OperationQueue&) = delete;

  // Starts the operation, at once where all before it are started. Throws what its first call throws, and
  // where one before it failed.
  std::shared_ptr<QueuedOperation> start(TransportCalls calls, Transport::Milliseconds timeout);

 private:
  void work_off();

  const std::shared_ptr<Transport> transport_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<QueuedOperation>> waiting_;  // the first may be under way
  std::exception_ptr error_;
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace pacer::detail
