// Writing to somebody who has gone: an error, and no signal that ends the program.
#include <cerrno>
#include <csignal>
#include <ctime>
#include <thread>

#include <unistd.h>

#include <pacer/collectives/detail/broken_pipe.h>

#include "support/catch.h"

namespace pacer::testing::broken_pipe {
namespace {

// What a write to a pipe that nobody reads fails with. Without a guard it would end this program.
int error_of_write() {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  close(ends[0]);
  const int error = write(ends[1], "x", 1) == -1 ? errno : 0;
  close(ends[1]);
  return error;
}

bool is_blocked() {
  sigset_t mask;
  REQUIRE(pthread_sigmask(SIG_BLOCK, nullptr, &mask) == 0);
  return sigismember(&mask, SIGPIPE) == 1;
}

bool is_pending() {
  sigset_t pending;
  REQUIRE(sigpending(&pending) == 0);
  return sigismember(&pending, SIGPIPE) == 1;
}

}  // namespace

TEST_CASE("a guarded write to a broken pipe is an error and nothing else", "[collectives]") {
  REQUIRE_FALSE(is_blocked());
  {
    const detail::NoBrokenPipe guard;
    CHECK(error_of_write() == EPIPE);
    const detail::NoBrokenPipe inner;
    CHECK(error_of_write() == EPIPE);
  }
  CHECK_FALSE(is_blocked());
  CHECK_FALSE(is_pending());
}

TEST_CASE("threads started under the guard stay guarded", "[collectives]") {
  std::thread thread;
  int error = 0;
  {
    const detail::NoBrokenPipe guard;
    thread = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until the guard has gone
      error = error_of_write();
    });
  }
  thread.join();
  CHECK(error == EPIPE);
}

TEST_CASE("a signal that was there before stays, and so does a mask", "[collectives]") {
  sigset_t sigpipe, before;
  sigemptyset(&sigpipe);
  sigaddset(&sigpipe, SIGPIPE);
  REQUIRE(pthread_sigmask(SIG_BLOCK, &sigpipe, &before) == 0);
  raise(SIGPIPE);
  {
    const detail::NoBrokenPipe guard;
    CHECK(error_of_write() == EPIPE);
  }
  CHECK(is_blocked());
  CHECK(is_pending());
  const timespec at_once{};
  sigtimedwait(&sigpipe, nullptr, &at_once);
  REQUIRE(pthread_sigmask(SIG_SETMASK, &before, nullptr) == 0);
}

}  // namespace pacer::testing::broken_pipe
