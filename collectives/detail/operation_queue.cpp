#include <pacer/collectives/detail/operation_queue.h>

#include <algorithm>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/signals_blocked.h>

namespace pacer::detail {

QueuedOperation::~QueuedOperation() {
  if (!is_on_stream_ || calls_.calls.empty()) return;
  try {  // the memory goes back to the caller's stream, which must not use it before
    work_->wait();
  } catch (const std::exception&) {  // it failed: nothing uses the memory any more
  }
}

void QueuedOperation::enqueue() {
  is_started_ = true;
  if (is_simple() && !calls_.after) {
    start(timeout_);
    return;
  }
  work_ = transport_->run_on_stream([this] {
    for (const TransportCall& call : calls_.calls) {
      if (const TransportWorkPtr done = call(*transport_, timeout_)) done->wait();
    }
    if (calls_.after) calls_.after();
  });
  is_on_stream_ = true;
}

void QueuedOperation::wait() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_until(lock, deadline_, [&] { return is_started_; })) throw timed_out();
    if (error_) std::rethrow_exception(error_);
  }
  try {
    if (work_ != nullptr) work_->wait();
  } catch (const TransportTimeout&) {
    if (is_simple() || is_on_stream_) throw;
    throw timed_out();  // the last call had only what was left
  }
  if (calls_.after && !is_on_stream_) calls_.after();
  calls_ = {};  // they hold memory
}

bool QueuedOperation::is_done() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_started_) return std::chrono::steady_clock::now() >= deadline_;
  return error_ || work_ == nullptr || work_->is_done();
}

void QueuedOperation::run() noexcept {
  try {
    while (next_ < calls_.calls.size()) {
      if (work_ != nullptr) work_->wait();
      start(time_left());
    }
  } catch (const TransportTimeout&) {
    fail(std::make_exception_ptr(timed_out()));
    return;
  } catch (const std::exception&) {
    fail(std::current_exception());
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  is_started_ = true;
  changed_.notify_all();
}

void QueuedOperation::fail(std::exception_ptr error) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = std::move(error);
  is_started_ = true;
  changed_.notify_all();
}

// At least 1 ms, and rounded up, so that what was waited for in vain is past its deadline.
Transport::Milliseconds QueuedOperation::time_left() const {
  const auto left = std::chrono::ceil<Transport::Milliseconds>(deadline_ - std::chrono::steady_clock::now());
  return std::max(left, Transport::Milliseconds(1));
}

TransportTimeout QueuedOperation::timed_out() const {
  return TransportTimeout(concatenate("not done after ", timeout_.count(), " ms"));
}

OperationQueue::~OperationQueue() {
  bool is_busy = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
    is_busy = !waiting_.empty();
    changed_.notify_all();
  }
  if (is_busy) transport_->abort();  // so that what is under way ends
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<QueuedOperation> OperationQueue::start(TransportCalls calls,
                                                       Transport::Milliseconds timeout) {
  auto operation = std::make_shared<QueuedOperation>(transport_, std::move(calls), timeout);
  if (transport_->has_stream()) {
    operation->enqueue();
    return operation;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  if (waiting_.empty()) {
    operation->start(timeout);
    if (operation->is_simple()) {
      operation->is_started_ = true;
      return operation;
    }
  }
  waiting_.push_back(operation);
  if (!thread_.joinable()) {
    const SignalsBlocked for_the_thread;
    thread_ = std::thread([this] { work_off(); });
  }
  changed_.notify_all();
  return operation;
}

void OperationQueue::work_off() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_ending_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const std::shared_ptr<QueuedOperation> operation = waiting_.front();
    if (is_ending_ && !error_) error_ = std::make_exception_ptr(Error("the communicator has ended"));
    if (error_) {
      operation->fail(error_);
    } else {
      lock.unlock();
      operation->run();
      lock.lock();
      error_ = operation->error_;
    }
    waiting_.pop_front();
  }
}

}  // namespace pacer::detail
