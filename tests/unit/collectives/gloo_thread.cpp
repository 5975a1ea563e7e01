// The thread of a Gloo transport with connections and messages that do what a test wants: above all, not
// return.
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pacer/collectives/detail/gloo_thread.h>
#include <pacer/collectives/detail/transport.h>
#include <pacer/core/error.h>

#include "support/catch.h"

namespace pacer::testing::gloo_thread {
namespace {

using namespace std::chrono_literals;
using detail::GlooMessages;
using detail::GlooOperation;
using detail::GlooThread;
using detail::TransportTimeout;
using Clock = std::chrono::steady_clock;

// Who passes waits until it is opened.
class Gate {
 public:
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return is_open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

// As those of c10d: abort() ends a wait() that is under way, or the next one, which returns false.
class Message : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return is_through_ || is_aborted_ || !failure_.empty(); });
    if (!failure_.empty()) throw std::runtime_error(failure_);
    return !std::exchange(is_aborted_, false);
  }
  void abort() override {
    set([&] { is_aborted_ = true; });
  }
  void arrive() {
    set([&] { is_through_ = true; });
  }
  void fail(const std::string& words) {
    set([&] { failure_ = words; });
  }

 private:
  void set(const std::function<void()>& f) {
    const std::lock_guard<std::mutex> lock(mutex_);
    f();
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_through_ = false, is_aborted_ = false;
  std::string failure_;
};

c10::intrusive_ptr<Message> message() { return c10::make_intrusive<Message>(); }

// Calls into Gloo, each of which may be one that does not return.
struct Calls {
  std::function<void()> connect = [] {}, close = [] {}, destroy = [] {};
};

class Group : public detail::GlooGroup {
 public:
  explicit Group(Calls calls) : calls_(std::move(calls)) { calls_.connect(); }
  ~Group() override { calls_.destroy(); }
  void close() override { calls_.close(); }

 private:
  const Calls calls_;
};

std::shared_ptr<GlooThread> connected(const Calls& calls, std::chrono::milliseconds limit = 10s,
                                      std::chrono::milliseconds abort_limit = 200ms) {
  auto thread = std::make_shared<GlooThread>(abort_limit);
  thread->connect(
      [calls](const std::function<void()>& met) {
        met();
        return std::make_unique<Group>(calls);
      },
      limit);
  return thread;
}

std::shared_ptr<GlooOperation> started(GlooThread& thread, std::function<GlooMessages()> start,
                                       std::chrono::milliseconds limit = 10s) {
  auto operation = std::make_shared<GlooOperation>(limit);
  operation->start = [start = std::move(start), has_begun = false]() mutable {
    return std::exchange(has_begun, true) ? GlooMessages() : start();
  };
  thread.start(operation);
  return operation;
}

void end(const std::shared_ptr<GlooThread>& thread) {
  thread->abort();
  thread->release();
}

}  // namespace

TEST_CASE("a call into Gloo that does not return holds nobody beyond the deadline, nor at the end",
          "[collectives]") {
  const std::string which = GENERATE("start", "wait", "close", "destroy", "collective");
  CAPTURE(which);
  Gate gate;
  const auto stuck = [&] { gate.pass(); };
  Calls calls;
  if (which == "close") calls.close = stuck;
  if (which == "destroy") calls.destroy = stuck;
  const auto begin = Clock::now();
  std::weak_ptr<GlooThread> left;
  std::weak_ptr<int> memory;
  {
    const auto thread = connected(calls);
    left = thread;
    const auto tensor = std::make_shared<int>(0);
    memory = tensor;
    class Deaf : public Message {
     public:
      explicit Deaf(Gate& gate) : gate_(gate) {}
      bool wait(std::chrono::milliseconds) override {
        gate_.pass();
        return true;
      }

     private:
      Gate& gate_;
    };
    const auto operation = which == "collective"
                               ? std::make_shared<GlooOperation>(100ms)  // nobody finishes it
                               : started(
                                     *thread,
                                     [&, tensor]() -> GlooMessages {
                                       if (which == "start") stuck();
                                       if (which == "wait") return {c10::make_intrusive<Deaf>(gate)};
                                       return {message()};
                                     },
                                     100ms);
    CHECK_FALSE(thread->is_done(*operation));
    CHECK_THROWS_WITH(thread->wait(*operation), "not done after 100 ms");
    CHECK_THROWS_AS(thread->wait(*operation), std::exception);
    CHECK(thread->is_done(*operation));
    const char* const refusal =
        "the connections of this rank were closed because an operation was not done by its deadline";
    CHECK_THROWS_WITH(thread->require_open(), refusal);
    CHECK_THROWS_WITH(started(*thread, [] { return GlooMessages(); }), refusal);
    end(thread);
  }
  CHECK(Clock::now() - begin < 3s);
  if (which == "start") CHECK_FALSE(memory.expired());  // Gloo may still use it
  gate.open();
  while (!left.expired()) std::this_thread::sleep_for(1ms);  // the thread ends when it can
  CHECK(memory.expired());
}

TEST_CASE("abort returns once the connections are closed", "[collectives]") {
  const auto thread = connected({}, 10s, /*abort_limit=*/30s);
  const auto begin = Clock::now();
  end(thread);
  CHECK(Clock::now() - begin < 15s);
}

TEST_CASE("connecting has a deadline from when the ranks have met", "[collectives]") {
  Gate gate;
  Calls calls;
  std::weak_ptr<int> held;
  {
    const auto token = std::make_shared<int>(0);
    held = token;
    calls.connect = [&gate, token] { gate.pass(); };
  }
  const auto begin = Clock::now();
  CHECK_THROWS_AS(connected(std::exchange(calls, {}), 100ms), TransportTimeout);
  CHECK(Clock::now() - begin < 2s);
  gate.open();
  while (!held.expired()) std::this_thread::sleep_for(1ms);  // what came too late is closed and destroyed

  calls.connect = [] { throw InvalidArgument("no such address"); };
  CHECK_THROWS_AS(connected(calls), InvalidArgument);
}

TEST_CASE("a message is started while the thread waits for an earlier one, and completes after it",
          "[collectives]") {
  const auto thread = connected({});
  const auto first_message = message(), second_message = message();
  const auto first = started(*thread, [&]() -> GlooMessages { return {first_message}; });
  std::this_thread::sleep_for(50ms);
  Gate gate;
  const auto second = started(*thread, [&]() -> GlooMessages {
    gate.open();
    return {second_message};
  });
  gate.pass();
  second_message->arrive();
  std::this_thread::sleep_for(50ms);
  CHECK_FALSE(thread->is_done(*first));
  CHECK_FALSE(thread->is_done(*second));
  first_message->arrive();
  thread->wait(*second);
  CHECK(thread->is_done(*first));
  thread->wait(*first);
  end(thread);
}

TEST_CASE("what Gloo throws fails the operation alone, without the place in its source", "[collectives]") {
  const auto thread = connected({});
  const auto broken = message(), sound = message();
  const auto first = started(*thread, [&]() -> GlooMessages { return {broken}; });
  const auto second = started(*thread, [&]() -> GlooMessages { return {sound}; });
  const auto third = started(*thread, []() -> GlooMessages { throw Error("cannot start"); });
  broken->fail("[/gloo/pair.cc:1] Read error\nand more");
  CHECK_THROWS_WITH(thread->wait(*first), "Gloo: Read error");
  CHECK_THROWS_WITH(thread->wait(*third), "Gloo: cannot start");
  sound->arrive();
  thread->wait(*second);
  end(thread);
  CHECK_THROWS_WITH(thread->require_open(), "the connections of this rank were closed by abort()");
}

TEST_CASE("an operation begins messages until it has none, each after those before", "[collectives]") {
  const auto thread = connected({});
  const std::vector<c10::intrusive_ptr<Message>> messages = {message(), message()};
  std::atomic<size_t> begun{0};
  const bool fails = GENERATE(false, true);
  const auto rounds = std::make_shared<GlooOperation>(10s);
  rounds->start = [&, round = size_t{0}]() mutable -> GlooMessages {
    if (round == messages.size()) {
      if (fails) throw std::runtime_error("no third round");
      return {};
    }
    begun = round + 1;
    return {messages[round++]};
  };
  thread->start(rounds);
  const auto next = message();
  const auto behind = started(*thread, [&] { return GlooMessages{next}; });
  next->arrive();
  for (size_t round = 0; round < messages.size(); ++round) {
    while (begun <= round) std::this_thread::yield();
    std::this_thread::sleep_for(20ms);
    CHECK(begun == round + 1);
    CHECK_FALSE(thread->is_done(*rounds));
    CHECK_FALSE(thread->is_done(*behind));
    messages[round]->arrive();
  }
  if (fails) {
    CHECK_THROWS_WITH(thread->wait(*rounds), Catch::Matchers::ContainsSubstring("no third round"));
  } else {
    thread->wait(*rounds);
  }
  thread->wait(*behind);
  end(thread);
}

}  // namespace pacer::testing::gloo_thread
