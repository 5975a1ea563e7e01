#include <pacer/collectives/detail/broken_pipe.h>

#include <ctime>

namespace pacer::detail {
namespace {

sigset_t only_sigpipe() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  return set;
}

bool is_pending() {
  sigset_t pending;
  return sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1;
}

}  // namespace

NoBrokenPipe::NoBrokenPipe() noexcept : was_pending_(is_pending()) {
  const sigset_t sigpipe = only_sigpipe();
  pthread_sigmask(SIG_BLOCK, &sigpipe, &before_);
}

// A SIGPIPE that a write has raised meanwhile waits for this thread, and is taken away before it is let in.
NoBrokenPipe::~NoBrokenPipe() {
  if (!was_pending_ && is_pending()) {
    const sigset_t sigpipe = only_sigpipe();
    const timespec at_once{};
    sigtimedwait(&sigpipe, nullptr, &at_once);
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace pacer::detail
