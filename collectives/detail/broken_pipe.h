// Gloo writes to its sockets in a way that raises SIGPIPE where the peer has gone, which ends a program that
// does not expect it. Here the error that the write also returns is all that is left of it.
#pragma once

#include <csignal>

namespace pacer::detail {

// In this thread, while it lives, no write raises SIGPIPE; nor ever in threads that are started meanwhile.
class NoBrokenPipe {
 public:
  NoBrokenPipe() noexcept;
  ~NoBrokenPipe();
  NoBrokenPipe(const NoBrokenPipe&) = delete;
  NoBrokenPipe& operator=(const NoBrokenPipe&) = delete;

 private:
  sigset_t before_{};  // the thread's mask
  bool was_pending_ = false;
};

}  // namespace pacer::detail
