// Starts copies of the running program and watches them: their errors come out line by line with the rank in
// front, signals are passed on, one that fails takes the others with it, and none survives this process.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace examples {

class Supervisor {
 public:
  // `program`: for messages. From here on, SIGINT, SIGTERM and SIGHUP wait for wait().
  explicit Supervisor(const std::string& program);
  // Kills what still runs.
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;

  // Starts the next rank. `prepare` sets its variables; it runs in the new process. Throws pacer::Error.
  void start(char** arguments, const std::function<void()>& prepare);
  // Returns when all have ended, with the exit code that says how; see run_processes.
  int wait();

 private:
  using Clock = std::chrono::steady_clock;

  struct Rank {
    pid_t pid = -1;          // -1: has ended
    int errors = -1;         // the pipe's end to read, -1: closed
    std::string unfinished;  // line
    int status = 0;          // as waitpid reports it
  };

  [[noreturn]] void become_rank(char** arguments, const std::function<void()>& prepare, int errors);
  void wait_for_news();
  void take_signals();
  void reap();
  void pass_on_errors(size_t rank);
  void signal_all(int signal);
  void begin_to_end();
  void press_on();
  bool any_runs() const;

  std::string program_;
  pid_t own_pid_;
  sigset_t mask_before_;
  int signals_ = -1;
  std::vector<Rank> ranks_;
  std::vector<size_t> failed_;                 // in the order in which that was seen
  int interrupted_by_ = 0;                     // signal
  std::optional<Clock::time_point> deadline_;  // of the next, harsher signal
  bool asked_kindly_ = false;                  // SIGTERM was sent
};

}  // namespace examples
