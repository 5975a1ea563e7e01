// The calls into Gloo that may never return, on a thread of their own that is left behind where one does not.
//
// When connections are reset, Gloo's sending thread and its reading one can wait for each other for ever,
// with locks that every other call needs, too. And Gloo's own waits go by the wall clock, which can be set
// back. So callers wait for this thread alone, by a clock that nobody sets.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace pacer::detail {

using GlooClock = std::chrono::steady_clock;
using GlooMessages = std::vector<c10::intrusive_ptr<c10d::Work>>;

// The connections of a transport. The thread makes, closes and destroys them.
class GlooGroup {
 public:
  GlooGroup() = default;
  GlooGroup(const GlooGroup&) = delete;
  virtual ~GlooGroup() = default;
  // Ends what is under way.
  virtual void close() = 0;
};

// One operation under way. GlooThread keeps it, with its memory, until Gloo is through with it.
struct GlooOperation {
  explicit GlooOperation(std::chrono::milliseconds limit) : timeout(limit) {}

  const std::chrono::milliseconds timeout;
  const GlooClock::time_point deadline = GlooClock::now() + timeout;
  // Only the thread uses these two. `start` begins the next messages; it is called again when they are
  // through, until it begins none. `messages` are those that are not known to be through.
  std::function<GlooMessages()> start;
  GlooMessages messages;
  // Guarded by GlooThread's mutex.
  bool is_done = false;
  std::exception_ptr failure;
};

class GlooThread : public std::enable_shared_from_this<GlooThread> {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using OperationPtr = std::shared_ptr<GlooOperation>;
  // Makes the connections. Calls `met` when it knows where all ranks are, for which it has deadlines of its
  // own.
  using Connect = std::function<std::unique_ptr<GlooGroup>(const std::function<void()>& met)>;

  // `abort_limit`: how long abort() and release() wait.
  explicit GlooThread(Milliseconds abort_limit) : abort_limit_(abort_limit) {}
  GlooThread(const GlooThread&) = delete;

  // Starts the thread. Returns the connections once all are made, or throws: what `connect` throws, or
  // TransportTimeout where that takes longer than `timeout` from when the ranks have met. Without that,
  // nothing below may be called.
  GlooGroup& connect(Connect connect, Milliseconds timeout);

  // Lets the thread start messages, after those before them. They complete in this order. Throws Error once
  // the connections are closed.
  void start(const OperationPtr& operation);
  // For operations that go on by themselves: this one has ended. `failure`: what Gloo threw, or null.
  void finish(GlooOperation& operation, const std::exception_ptr& failure) noexcept;
  // Returns when the operation is done. Throws TransportTimeout at its deadline, and then closes the
  // connections, or Error where it has failed.
  void wait(GlooOperation& operation);
  // Never blocks. True also where wait() would throw.
  bool is_done(const GlooOperation& operation) const;

  // Throws Error once the connections are closed.
  void require_open() const;
  // Closes the connections. What is under way fails.
  void start_abort() noexcept;
  // The same. Returns when it is done, or gives up the thread: everybody who waits throws from then on.
  void abort() noexcept;
  // The last call. Destroys the group, or leaves it, with the thread, where that does not return.
  void release() noexcept;

 private:
  void run(Connect connect) noexcept;
  std::unique_ptr<GlooGroup> make_group(Connect connect) noexcept;
  std::exception_ptr start_messages(GlooOperation& operation) noexcept;
  void start_next(std::unique_lock<std::mutex>& lock);
  void wait_for_next(std::unique_lock<std::mutex>& lock);
  void conclude(std::unique_lock<std::mutex>& lock, std::list<OperationPtr> operations,
                const std::exception_ptr& failure);
  // With the mutex held.
  void end(const char* why) noexcept;
  void wake() noexcept;
  void set_done(GlooOperation& operation, const std::exception_ptr& failure) noexcept;
  std::exception_ptr meaning_of(const GlooOperation& operation, const std::exception_ptr& failure) const;

  const Milliseconds abort_limit_;
  std::thread thread_;
  mutable std::mutex mutex_;          // for what follows
  std::condition_variable work_;      // for the thread
  std::condition_variable progress_;  // for those who wait for it
  std::list<OperationPtr> to_start_, started_;
  c10::intrusive_ptr<c10d::Work> awaited_;  // the message that the thread waits for
  const char* why_ended_ = nullptr;         // null: open
  GlooClock::time_point ended_at_;
  GlooGroup* group_ = nullptr;  // once it is connected
  std::exception_ptr connect_failure_;
  bool has_met_ = false, is_closed_ = false, is_given_up_ = false, is_released_ = false, is_over_ = false;
};

}  // namespace pacer::detail
