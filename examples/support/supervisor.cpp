#include "support/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include <pacer/core/error.h>

#include "support/processes.h"

namespace examples {
namespace {

constexpr std::chrono::seconds kToEndByThemselves{5};
constexpr std::chrono::seconds kToEndWhenAsked{3};
constexpr size_t kLongestLine = 64 << 10;  // longer ones come in pieces
constexpr int kNotStarted = 127;

sigset_t watched_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&set, signal);
  return set;
}

int exit_code_of(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

std::string how_it_ended(int status) {
  if (!WIFSIGNALED(status)) return "ended with exit code " + std::to_string(WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  return "was killed by signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
}

void write_error(const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) return;
    if (count > 0) done += static_cast<size_t>(count);
  }
}

}  // namespace

Supervisor::Supervisor(const std::string& program)
    : program_(program.substr(program.rfind('/') + 1)), own_pid_(getpid()) {
  const sigset_t watched = watched_signals();
  sigprocmask(SIG_BLOCK, &watched, &mask_before_);
  signals_ = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals_ >= 0) return;
  const int reason = errno;
  sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
  throw pacer::Error(std::string("cannot watch processes: ") + std::strerror(reason));
}

Supervisor::~Supervisor() {
  signal_all(SIGKILL);
  for (Rank& rank : ranks_) {
    if (rank.pid > 0) waitpid(rank.pid, nullptr, 0);
    if (rank.errors >= 0) close(rank.errors);
  }
  close(signals_);
  sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
}

void Supervisor::start(char** arguments, const std::function<void()>& prepare) {
  int ends[2] = {-1, -1};
  pacer::require<pacer::Error>(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe for rank ", ranks_.size(),
                               ": ", std::strerror(errno));
  const pid_t pid = fork();
  if (pid == 0) become_rank(arguments, prepare, ends[1]);
  const int reason = errno;
  close(ends[1]);
  if (pid < 0) close(ends[0]);
  pacer::require<pacer::Error>(pid > 0, "cannot start rank ", ranks_.size(), ": ", std::strerror(reason),
                               "; ask for fewer processes");
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  ranks_.push_back({pid, ends[0], {}, 0});
}

void Supervisor::become_rank(char** arguments, const std::function<void()>& prepare, int errors) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);               // stays over exec
  if (getppid() != own_pid_) _exit(kNotStarted);  // it was too late for that
  dup2(errors, STDERR_FILENO);
  if (!ranks_.empty()) {
    const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    dup2(nothing, STDIN_FILENO);
    dup2(nothing, STDOUT_FILENO);
  }
  prepare();
  sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
  execv("/proc/self/exe", arguments);
  write_error(std::string("cannot start this program again: ") + std::strerror(errno) + "\n");
  _exit(kNotStarted);
}

bool Supervisor::any_runs() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.pid > 0; });
}

int Supervisor::wait() {
  while (any_runs()) {
    wait_for_news();
    take_signals();
    reap();
    press_on();
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank) pass_on_errors(rank);
  if (failed_.empty()) return 0;
  if (interrupted_by_ != 0) return 128 + interrupted_by_;
  // Who failed for reasons of its own is more interesting than who missed it first.
  const auto of_its_own = [&](size_t rank) { return exit_code_of(ranks_[rank].status) != kPeersFailed; };
  const auto found = std::find_if(failed_.begin(), failed_.end(), of_its_own);
  const size_t culprit = found == failed_.end() ? failed_.front() : *found;
  write_error(program_ + ": rank " + std::to_string(culprit) + " of " + std::to_string(ranks_.size()) + " " +
              how_it_ended(ranks_[culprit].status) + "\n");
  return exit_code_of(ranks_[culprit].status);
}

// Sleeps until a signal, an error text or the deadline; passes texts on.
void Supervisor::wait_for_news() {
  std::vector<pollfd> sources = {{signals_, POLLIN, 0}};
  for (const Rank& rank : ranks_) sources.push_back({rank.errors, POLLIN, 0});  // those of -1 are passed over
  int milliseconds = -1;
  if (deadline_) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now());
    milliseconds = static_cast<int>(std::max<int64_t>(0, left.count()));
  }
  if (poll(sources.data(), sources.size(), milliseconds) <= 0) return;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (sources[rank + 1].revents != 0) pass_on_errors(rank);
  }
}

void Supervisor::pass_on_errors(size_t index) {
  Rank& rank = ranks_[index];
  const std::string prefix = "[rank " + std::to_string(index) + "] ";
  char buffer[4096];
  ssize_t count = 0;
  while (rank.errors >= 0 && (count = read(rank.errors, buffer, sizeof buffer)) > 0) {
    rank.unfinished.append(buffer, static_cast<size_t>(count));
    size_t end = 0;
    while ((end = rank.unfinished.find('\n')) != std::string::npos) {
      write_error(prefix + rank.unfinished.substr(0, end + 1));
      rank.unfinished.erase(0, end + 1);
    }
    if (rank.unfinished.size() > kLongestLine)
      write_error(prefix + std::exchange(rank.unfinished, {}) + "\n");
  }
  if (rank.errors >= 0 && count == 0) close(std::exchange(rank.errors, -1));
  if ((rank.errors < 0 || rank.pid < 0) && !rank.unfinished.empty()) {
    write_error(prefix + std::exchange(rank.unfinished, {}) + "\n");
  }
}

void Supervisor::take_signals() {
  signalfd_siginfo info;
  while (read(signals_, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD) continue;
    interrupted_by_ = signal;
    // A terminal's signals have reached every process of the group.
    if (info.ssi_code != SI_KERNEL) signal_all(signal);
    begin_to_end();
  }
}

void Supervisor::reap() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    if (rank.pid < 0 || waitpid(rank.pid, &rank.status, WNOHANG) != rank.pid) continue;
    rank.pid = -1;
    if (exit_code_of(rank.status) == 0) continue;
    failed_.push_back(i);
    begin_to_end();
  }
}

void Supervisor::begin_to_end() {
  if (!deadline_) deadline_ = Clock::now() + kToEndByThemselves;
}

// Where the others take too long to end.
void Supervisor::press_on() {
  if (!deadline_ || Clock::now() < *deadline_) return;
  signal_all(asked_kindly_ ? SIGKILL : SIGTERM);
  asked_kindly_ = true;
  deadline_ = Clock::now() + kToEndWhenAsked;
}

void Supervisor::signal_all(int signal) {
  for (const Rank& rank : ranks_) {
    if (rank.pid > 0) kill(rank.pid, signal);
  }
}

}  // namespace examples
