// What the runs train on, and what the settings ask of it.
#pragma once

#include <string>

#include "settings.h"

namespace convergence {

struct Machine {
  std::string device;       // "cpu" or "cuda"
  std::string description;  // for people, with the number of threads
};

// Applies device, precision and threads, once per program and before the first run. Throws
// pacer::InvalidArgument where they ask for a CUDA device and there is none.
Machine prepare_machine(const Settings& settings);

}  // namespace convergence
