// What a rank knows, and how it comes to know it. Starting and watching ranks is in supervisor.cpp.
#include "support/processes.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string>
#include <thread>

#include <pacer/collectives/launch_environment.h>
#include <pacer/core/error.h>

#include "support/private_folder.h"
#include "support/supervisor.h"

namespace examples {
namespace {

constexpr const char* kRank = "PACER_PROCESS_RANK";
constexpr const char* kCount = "PACER_PROCESS_COUNT";
constexpr const char* kFile = "PACER_PROCESS_FILE";

struct Place {
  int rank = 0, count = 0;
  std::string file;
};

int number_in(const char* variable) {
  const char* text = std::getenv(variable);
  const std::string value = text == nullptr ? "" : text;
  int number = -1;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  pacer::require(error == std::errc() && end == value.data() + value.size() && number >= 0, variable, " is '",
                 value, "', not a number >= 0; it is set for the ranks that --processes starts, so unset it");
  return number;
}

// This process's place among those of run_processes.
std::optional<Place> own_place() {
  const char* file = std::getenv(kFile);
  if (file == nullptr) return std::nullopt;
  return Place{number_in(kRank), number_in(kCount), file};
}

// Cores that this process may use.
int available_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

std::optional<int> run_processes(int count, char** arguments) {
  pacer::require(count >= 1, "a program runs in at least 1 process, not in ", count);
  if (count == 1 || own_place()) return std::nullopt;
  const pacer::LaunchEnvironment launch = pacer::read_launch_environment();
  if (launch.world_size == count) return std::nullopt;
  pacer::require(launch.world_size == 1, count, " processes were asked for, but ", launch.launcher,
                 " has started ", launch.world_size, "; leave --processes out under a launcher");

  const PrivateFolder folder;
  const std::string file = folder.path() + "/meeting";
  const int threads = std::max(1, available_cores() / count);
  Supervisor ranks(arguments[0]);
  for (int rank = 0; rank < count; ++rank) {
    ranks.start(arguments, [&] {
      setenv(kRank, std::to_string(rank).c_str(), 1);
      setenv(kCount, std::to_string(count).c_str(), 1);
      setenv(kFile, file.c_str(), 1);
      setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), /*overwrite=*/0);
    });
  }
  return ranks.wait();
}

std::optional<int> started_processes() {
  if (const auto place = own_place()) return place->count;
  const pacer::LaunchEnvironment launch = pacer::read_launch_environment();
  return launch.launcher.empty() ? std::nullopt : std::optional<int>(launch.world_size);
}

std::shared_ptr<pacer::Communicator> join_processes(const pacer::CommunicatorOptions& options) {
  if (const auto place = own_place()) {
    return pacer::Communicator::from_file(place->file, place->rank, place->count, options);
  }
  return pacer::Communicator::from_environment(options);
}

}  // namespace examples
