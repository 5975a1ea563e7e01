// What a rank does, by name: run_ranks.py starts the same program once for each rank, and says which scenario
// to play. A scenario talks to it by lines on standard output, and fails by an exception.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>

#include <pacer/collectives/detail/connect.h>
#include <pacer/core/error.h>

namespace pacer::testing {

// This process, as run_ranks.py started it.
struct Player {
  int rank = 0;
  int world_size = 1;
  std::map<std::string, std::string> arguments;

  bool has(const std::string& name) const { return arguments.count(name) != 0; }
  std::string text(const std::string& name) const;
  int number(const std::string& name) const { return std::stoi(text(name)); }
  int number(const std::string& name, int otherwise) const { return has(name) ? number(name) : otherwise; }

  // From the arguments file=PATH, or host=, port= and listen=; timeout= is in milliseconds.
  detail::RendezvousSettings settings() const;
  CommunicatorOptions options() const;
  detail::Connection connect() const { return detail::connect(settings(), options()); }
};

// One line, seen by run_ranks.py at once.
void say(const std::string& line);
// Sleeps until somebody ends this process.
[[noreturn]] void sleep_for_ever();

// Throws Error unless `condition` holds.
template <class... Parts>
void expect(bool condition, const Parts&... parts) {
  require<Error>(condition, "expected ", parts...);
}

class Stopwatch {
 public:
  int64_t milliseconds() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start_)
        .count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

using Scenario = std::function<void(const Player&)>;

// A global one of these, in any source file here, adds a scenario.
class AddScenario {
 public:
  AddScenario(const char* name, Scenario scenario);
};

const std::map<std::string, Scenario>& scenarios();

}  // namespace pacer::testing
