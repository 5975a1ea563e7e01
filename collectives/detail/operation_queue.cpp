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
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<QueuedOperation> OperationQueue::start(OperationParts parts) {
  auto operation = std::make_shared<QueuedOperation>(std::move(parts));
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

bool OperationQueue::is_busy() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !waiting_.empty();
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
