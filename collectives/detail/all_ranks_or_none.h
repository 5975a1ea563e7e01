// What ranks do together or not at all, and what they hear of one that fails alone.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>

namespace pacer::detail {

// Does f on every rank and returns what it returned on each. Where it throws on one, all ranks throw: "rank 1
// could not ACTION: " and what it said, as InvalidArgument where it threw that, else as FileError; both are
// HeardByAll, too. A single rank throws what f throws. Ranks wait for the slowest as long as `timeout` says.
std::vector<std::string> on_all_ranks_or_none(Communicator& world, std::chrono::milliseconds timeout,
                                              const char* action, const std::function<std::string()>& f);

// An error that every rank has thrown, so that none waits for another.
class HeardByAll {
 public:
  virtual ~HeardByAll() = default;
};

// This rank's set-up failed. The others hear the reason at once, wherever they wait, unless they have heard
// it; `world` is of no more use then.
void leave_after(Communicator& world, const std::exception& error);

// Does f, a part of what each rank does by itself before training. Where it throws on this rank, the rank
// leaves the others.
template <class F>
void set_up(Communicator& world, const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    leave_after(world, error);
    throw;
  }
}

}  // namespace pacer::detail
