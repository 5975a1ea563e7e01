// Signals are for the program's own threads: none is delivered to a thread that starts while a SignalsBlocked
// of the thread that starts it lives.
#pragma once

#include <csignal>

#include <pthread.h>

namespace pacer {

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace pacer
