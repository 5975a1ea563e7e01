// Reads who this process is from the variables that launchers set. A pure function of the environment, so
// that every dialect can be tested without its launcher.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace pacer {

struct LaunchEnvironment {
  std::string launcher;  // "torchrun", "Open MPI", "MPICH", "Slurm", or "" for a single process
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_size = 1;
  // Where to meet; host is empty where the launcher says nothing and all ranks are on this host: then they
  // meet through a file named after `job`.
  std::string host;
  int port = 0;
  bool store_is_hosted = false;  // torchrun's agent listens at host:port
  // Identifies this launch, torchrun's in all its attempts: letters, digits, '-', '_' and '.'.
  std::string job;
};

// The value of a variable, or nothing.
using EnvironmentReader = std::function<std::optional<std::string>(const char* name)>;

// Throws InvalidArgument that names the variable for values that are no numbers, ranks outside the world,
// sets that are incomplete, and jobs over several hosts without an address.
LaunchEnvironment read_launch_environment(const EnvironmentReader& read);
// Reads the environment of this process.
LaunchEnvironment read_launch_environment();

}  // namespace pacer
