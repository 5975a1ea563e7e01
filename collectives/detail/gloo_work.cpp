#include <pacer/collectives/detail/gloo_work.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include <pacer/collectives/detail/broken_pipe.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

using GlooClock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using GroupWork = c10::intrusive_ptr<c10d::Work>;

// At least 1 ms, as 0 would mean for ever; rounded up, so that what was waited for in vain is past its
// deadline.
Milliseconds time_left(GlooClock::time_point deadline) {
  return std::max(std::chrono::ceil<Milliseconds>(deadline - GlooClock::now()), Milliseconds(1));
}

bool is_over(const std::future<void>& waiting) {
  return waiting.wait_for(Milliseconds(0)) == std::future_status::ready;
}

// What `error` means. `in_time`: it came before the deadline.
std::exception_ptr meaning_of(const GlooState& state, const std::exception& error, bool in_time,
                              Milliseconds timeout) {
  try {
    state.require_open();
  } catch (const Error&) {
    return std::current_exception();
  }
  const std::string words = words_of_gloo(error);
  if (in_time && words.find("imed out") == std::string::npos) {
    return std::make_exception_ptr(Error("Gloo: " + words));
  }
  return std::make_exception_ptr(TransportTimeout(concatenate("not done after ", timeout.count(), " ms")));
}

class GlooWork final : public TransportWork {
 public:
  GlooWork(std::shared_ptr<GlooState> state, GroupWork work, Milliseconds timeout)
      : state_(std::move(state)),
        work_(std::move(work)),
        timeout_(timeout),
        deadline_(GlooClock::now() + timeout) {}

  void wait() override {
    try {
      work_->wait(time_left(deadline_));
    } catch (const std::exception& error) {
      std::rethrow_exception(meaning_of(*state_, error, work_->isCompleted(), timeout_));
    }
  }

  bool is_done() override { return work_->isCompleted() || GlooClock::now() >= deadline_; }

 private:
  std::shared_ptr<GlooState> state_;
  GroupWork work_;
  const Milliseconds timeout_;
  const GlooClock::time_point deadline_;
};

// Gloo cannot be asked whether a message is through, only waited for, so is_done() and a work that is dropped
// let a thread wait.
class GlooMessages final : public TransportWork {
 public:
  GlooMessages(std::shared_ptr<GlooState> state, std::vector<GroupWork> messages, Milliseconds timeout,
               std::function<void()> after)
      : state_(std::move(state)),
        messages_(std::move(messages)),
        timeout_(timeout),
        deadline_(GlooClock::now() + timeout),
        after_(std::move(after)) {}

  ~GlooMessages() override {
    if (messages_.empty()) return;
    try {
      start_waiting();
    } catch (const std::system_error&) {  // no more threads: the messages, with their memory, stay for good
      new std::vector<GroupWork>(std::move(messages_));
      return;
    }
    const std::lock_guard<std::mutex> lock(state_->starting);
    std::vector<std::future<void>>& dropped = state_->dropped;
    dropped.erase(std::remove_if(dropped.begin(), dropped.end(), is_over), dropped.end());
    dropped.push_back(std::move(waiting_));
  }

  void wait() override {
    if (failure_) std::rethrow_exception(failure_);
    try {
      if (waiting_.valid()) {
        waiting_.get();
      } else {
        wait_for(messages_, deadline_);
      }
    } catch (const std::exception& error) {
      failure_ = meaning_of(*state_, error, GlooClock::now() < deadline_, timeout_);
    }
    messages_.clear();
    if (failure_) std::rethrow_exception(failure_);
    if (after_) std::exchange(after_, nullptr)();
  }

  bool is_done() override {
    if (messages_.empty()) return true;
    start_waiting();
    return is_over(waiting_);
  }

 private:
  void start_waiting() {
    if (waiting_.valid()) return;
    waiting_ = std::async(std::launch::async, &GlooMessages::wait_for, messages_, deadline_);
  }

  static void wait_for(const std::vector<GroupWork>& messages, GlooClock::time_point deadline) {
    const NoBrokenPipe guard;  // Gloo closes connections here whose deadline has passed
    for (const GroupWork& message : messages) message->wait(time_left(deadline));
  }

  std::shared_ptr<GlooState> state_;
  std::vector<GroupWork> messages_;  // none once all are through, or one has failed
  const Milliseconds timeout_;
  const GlooClock::time_point deadline_;
  std::function<void()> after_;
  std::exception_ptr failure_;
  std::future<void> waiting_;
};

}  // namespace

void GlooState::require_open() const {
  require<Error>(!ended, "the connections of this rank were closed by abort()");
}

std::string words_of_gloo(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  const size_t place = text.find("] ");
  return text.rfind('[', 0) == 0 && place != std::string::npos ? text.substr(place + 2) : text;
}

TransportWorkPtr make_gloo_work(std::shared_ptr<GlooState> state, GroupWork work, Milliseconds timeout) {
  return std::make_unique<GlooWork>(std::move(state), std::move(work), timeout);
}

TransportWorkPtr make_gloo_messages(std::shared_ptr<GlooState> state, std::vector<GroupWork> messages,
                                    Milliseconds timeout, std::function<void()> after) {
  return std::make_unique<GlooMessages>(std::move(state), std::move(messages), timeout, std::move(after));
}

}  // namespace pacer::detail
