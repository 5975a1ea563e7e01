#include <pacer/collectives/detail/operation_queue.h>

#include <utility>

#include <pacer/core/error.h>
#include <pacer/core/signals_blocked.h>

namespace pacer::detail {

QueuedOperation::~QueuedOperation() {
  if (!is_on_stream_ || parts_.parts.empty()) return;
  try {  // the memory goes back to the caller's stream, which must not use it before
    work_->wait();
  } catch (const std::exception&) {  // it failed: nothing uses the memory any more
  }
}

void QueuedOperation::enqueue() {
  is_started_ = true;
  if (is_simple() && !parts_.after) {
    start();
    return;
  }
  work_ = transport_->run_on_stream([this] {
    for (const OperationPart& part : parts_.parts) {
      if (const TransportWorkPtr done = part(*transport_, timeout_)) done->wait();
    }
    if (parts_.after) parts_.after();
  });
  is_on_stream_ = true;
}

void QueuedOperation::wait() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return is_started_; });
    if (error_) std::rethrow_exception(error_);
  }
  if (work_ != nullptr) work_->wait();
  if (parts_.after && !is_on_stream_) parts_.after();
  parts_ = {};  // they hold memory
}

bool QueuedOperation::is_done() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_started_ && (error_ || work_ == nullptr || work_->is_done());
}

void QueuedOperation::run() noexcept {
  try {
    while (next_ < parts_.parts.size()) {
      if (work_ != nullptr) work_->wait();
      start();
    }
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

std::shared_ptr<QueuedOperation> OperationQueue::start(OperationParts parts,
                                                       Transport::Milliseconds timeout) {
  auto operation = std::make_shared<QueuedOperation>(transport_, std::move(parts), timeout);
  if (transport_->has_stream()) {
    operation->enqueue();
    return operation;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  if (waiting_.empty()) {
    operation->start();
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
