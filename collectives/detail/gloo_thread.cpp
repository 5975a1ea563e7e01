#include <pacer/collectives/detail/gloo_thread.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include <pacer/collectives/detail/gloo_uncaught.h>
#include <pacer/collectives/detail/transport.h>
#include <pacer/core/error.h>
#include <pacer/files/signals_blocked.h>

namespace pacer::detail {
namespace {

// Gloo's own deadline comes after ours, and matters only where nobody waits.
constexpr std::chrono::milliseconds kGrace{500};

std::chrono::milliseconds limit_of_gloo(const GlooOperation& operation) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(operation.deadline - GlooClock::now());
  return std::max(left, std::chrono::milliseconds(0)) + kGrace;
}

std::exception_ptr timeout_of(const GlooOperation& operation) {
  return std::make_exception_ptr(
      TransportTimeout(concatenate("not done after ", operation.timeout.count(), " ms")));
}

std::exception_ptr closed_because(const char* why) {
  return std::make_exception_ptr(Error(concatenate("the connections of this rank were closed ", why)));
}

// What Gloo said, in one line, without the place in its source.
std::string words_of(const std::exception_ptr& failure) {
  std::string text = "an unknown failure";
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    text = first_line(error.what());
  } catch (...) {  // not by any class of Gloo's
  }
  const size_t place = text.find("] ");
  return text.rfind('[', 0) == 0 && place != std::string::npos ? text.substr(place + 2) : text;
}

}  // namespace

GlooGroup& GlooThread::connect(Connect connect, Milliseconds timeout) {
  {
    const SignalsBlocked for_the_thread;  // and for Gloo's, which it starts: no write raises SIGPIPE there
    thread_ = std::thread([self = shared_from_this(), connect = std::move(connect)]() mutable {
      self->run(std::move(connect));
    });
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const auto has_tried = [&] { return group_ != nullptr || connect_failure_ != nullptr; };
  progress_.wait(lock, [&] { return has_met_ || has_tried(); });
  progress_.wait_for(lock, timeout, has_tried);
  if (group_ != nullptr) return *group_;
  const std::exception_ptr failure = connect_failure_;
  end("before all were made");
  is_released_ = true;
  lock.unlock();
  if (failure == nullptr) {
    thread_.detach();
    throw TransportTimeout(concatenate("not connected after ", timeout.count(), " ms"));
  }
  thread_.join();
  std::rethrow_exception(failure);
}

void GlooThread::start(const OperationPtr& operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (why_ended_ != nullptr) std::rethrow_exception(closed_because(why_ended_));
  to_start_.push_back(operation);
  wake();
}

void GlooThread::finish(GlooOperation& operation, const std::exception_ptr& failure) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    set_done(operation, failure);
  }
  progress_.notify_all();
}

void GlooThread::wait(GlooOperation& operation) {
  std::unique_lock<std::mutex> lock(mutex_);
  progress_.wait_until(lock, operation.deadline, [&] { return operation.is_done || is_given_up_; });
  if (operation.failure != nullptr) std::rethrow_exception(operation.failure);
  if (operation.is_done) return;
  if (is_given_up_) std::rethrow_exception(closed_because(why_ended_));
  end("because an operation was not done by its deadline");
  std::rethrow_exception(timeout_of(operation));
}

bool GlooThread::is_done(const GlooOperation& operation) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return operation.is_done || is_given_up_ || GlooClock::now() >= operation.deadline;
}

void GlooThread::require_open() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (why_ended_ != nullptr) std::rethrow_exception(closed_because(why_ended_));
}

void GlooThread::start_abort() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  end("by abort()");
}

void GlooThread::abort() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  end("by abort()");
  if (progress_.wait_until(lock, ended_at_ + abort_limit_, [&] { return is_closed_ || is_given_up_; }))
    return;
  is_given_up_ = true;
  progress_.notify_all();
}

void GlooThread::release() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  is_released_ = true;
  work_.notify_all();
  if (!is_given_up_) progress_.wait_for(lock, abort_limit_, [&] { return is_over_; });
  const bool is_over = is_over_;
  lock.unlock();
  if (is_over) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void GlooThread::run(Connect connect) noexcept {
  stop_thread_on_uncaught_exception();
  std::unique_ptr<GlooGroup> group = make_group(std::move(connect));
  if (group == nullptr) return;
  std::unique_lock<std::mutex> lock(mutex_);
  while (why_ended_ == nullptr) {
    if (!to_start_.empty()) {
      start_next(lock);
    } else if (!started_.empty()) {
      wait_for_next(lock);
    } else {
      work_.wait(lock);
    }
  }
  lock.unlock();
  group->close();
  lock.lock();
  std::list<OperationPtr> under_way = std::move(started_);
  under_way.splice(under_way.end(), to_start_);
  is_closed_ = true;
  conclude(lock, std::move(under_way), closed_because(why_ended_));
  work_.wait(lock, [&] { return is_released_; });
  lock.unlock();
  group.reset();
  lock.lock();
  is_over_ = true;
  progress_.notify_all();
}

std::unique_ptr<GlooGroup> GlooThread::make_group(Connect connect) noexcept {
  std::unique_ptr<GlooGroup> group;
  std::exception_ptr failure;
  try {
    group = connect([this] {
      const std::lock_guard<std::mutex> lock(mutex_);
      has_met_ = true;
      progress_.notify_all();
    });
  } catch (...) {  // rethrown by connect()
    failure = std::current_exception();
  }
  connect = nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  group_ = group.get();
  connect_failure_ = failure;
  progress_.notify_all();
  return group;
}

// Returns what was thrown, which wait() rethrows.
std::exception_ptr GlooThread::start_messages(GlooOperation& operation) noexcept {
  try {
    operation.messages = operation.start();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

void GlooThread::start_next(std::unique_lock<std::mutex>& lock) {
  const OperationPtr operation = to_start_.front();
  lock.unlock();
  const std::exception_ptr failure = start_messages(*operation);
  lock.lock();
  started_.splice(started_.end(), to_start_, to_start_.begin());
  if (failure == nullptr && !operation->messages.empty()) return;
  std::list<OperationPtr> done;
  done.splice(done.end(), started_, std::prev(started_.end()));
  conclude(lock, std::move(done), failure);
}

void GlooThread::wait_for_next(std::unique_lock<std::mutex>& lock) {
  const OperationPtr operation = started_.front();
  GlooMessages& messages = operation->messages;
  const std::chrono::milliseconds limit = limit_of_gloo(*operation);
  awaited_ = messages.back();
  lock.unlock();
  bool is_through = false;  // false without a failure: wake() has ended the wait
  std::exception_ptr failure;
  try {
    is_through = awaited_->wait(limit);
  } catch (...) {  // rethrown by wait()
    failure = std::current_exception();
  }
  if (is_through) messages.pop_back();
  if (failure == nullptr && messages.empty()) failure = start_messages(*operation);
  lock.lock();
  awaited_.reset();
  if (failure == nullptr && !messages.empty()) return;
  std::list<OperationPtr> done;
  done.splice(done.end(), started_, started_.begin());
  conclude(lock, std::move(done), failure);
}

// Their memory is given back without the lock, after those who wait were told.
void GlooThread::conclude(std::unique_lock<std::mutex>& lock, std::list<OperationPtr> operations,
                          const std::exception_ptr& failure) {
  for (const OperationPtr& operation : operations) set_done(*operation, failure);
  lock.unlock();
  progress_.notify_all();
  for (const OperationPtr& operation : operations) {
    operation->messages.clear();
    operation->start = nullptr;
  }
  operations.clear();
  lock.lock();
}

void GlooThread::end(const char* why) noexcept {
  if (why_ended_ != nullptr) return;
  why_ended_ = why;
  ended_at_ = GlooClock::now();
  wake();
}

void GlooThread::wake() noexcept {
  work_.notify_one();
  if (awaited_ != nullptr) awaited_->abort();  // of c10d's works: it ends a wait, and changes nothing else
}

void GlooThread::set_done(GlooOperation& operation, const std::exception_ptr& failure) noexcept {
  operation.is_done = true;
  if (failure == nullptr) return;
  try {
    operation.failure = meaning_of(operation, failure);
  } catch (const std::exception&) {  // no memory for words
    operation.failure = failure;
  }
}

std::exception_ptr GlooThread::meaning_of(const GlooOperation& operation,
                                          const std::exception_ptr& failure) const {
  if (why_ended_ != nullptr) return closed_because(why_ended_);
  const std::string words = words_of(failure);
  if (GlooClock::now() >= operation.deadline || words.find("imed out") != std::string::npos) {
    return timeout_of(operation);
  }
  return std::make_exception_ptr(Error("Gloo: " + words));
}

}  // namespace pacer::detail
