#include <pacer/checkpoints/detail/stop_signals.h>

#include <atomic>
#include <csignal>
#include <mutex>

namespace pacer::detail {
namespace {

constexpr int kSignals[] = {SIGTERM, SIGINT};

std::atomic<bool> requested_stop{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

extern "C" void remember_stop(int /*signal*/) {
  requested_stop = true;
  for (const int signal : kSignals) std::signal(signal, SIG_DFL);
}

std::mutex mutex;  // of the two below
int users = 0;
struct sigaction before[2];

}  // namespace

StopSignals::StopSignals() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (users++ > 0) return;
  requested_stop = false;
  struct sigaction action {};
  action.sa_handler = remember_stop;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 2; ++i) {
    sigaction(kSignals[i], nullptr, &before[i]);
    // Who starts a program with a signal ignored (nohup, a shell's background job) wants it ignored.
    if (before[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (--users > 0) return;
  for (int i = 0; i < 2; ++i) {
    struct sigaction now {};
    sigaction(kSignals[i], nullptr, &now);
    // What the program has set meanwhile stays.
    const bool is_ours = now.sa_handler == remember_stop || (requested_stop && now.sa_handler == SIG_DFL);
    if (is_ours) sigaction(kSignals[i], &before[i], nullptr);
  }
}

bool StopSignals::requested() { return requested_stop; }

}  // namespace pacer::detail
