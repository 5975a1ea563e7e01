// What the runs train on, and what the settings ask of it.
#pragma once

#include <memory>
#include <string>

#include <pacer/collectives/communicator.h>

#include "settings.h"

namespace convergence {

struct Machine {
  std::shared_ptr<pacer::Communicator> world;  // the ranks that train together; device() is this one's
  std::string description;                     // for people, with the numbers of processes and threads
};

// Whether the study trains on GPUs.
bool uses_cuda(const Settings& settings);

// How many ranks the study has: those that a launcher has started, else settings.processes, with 0 resolved:
// all GPUs, or two on a CPU with two cores or more, or fewer, so that they share a batch evenly. Throws
// pacer::InvalidArgument where launcher and settings contradict each other.
int64_t choose_processes(const Settings& settings);

// Applies device, precision and threads and joins the ranks, once per program and before the first run.
// Throws pacer::InvalidArgument where they ask for a CUDA device and there is none, and as Communicator does.
Machine prepare_machine(const Settings& settings);

}  // namespace convergence
