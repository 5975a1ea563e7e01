// What ranks do together or not at all.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>

namespace pacer::detail {

// Does f on every rank and returns what it returned on each. Where it throws on one, all ranks throw: "rank 1
// could not ACTION: " and what it said, as InvalidArgument where it threw that, else as FileError. A single
// rank throws what f throws. Ranks wait for the slowest as long as `timeout` says.
std::vector<std::string> together(Communicator& world, std::chrono::milliseconds timeout, const char* action,
                                  const std::function<std::string()>& f);

}  // namespace pacer::detail
