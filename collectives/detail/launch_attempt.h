// Attempts of a launch that share a store. A launcher that starts its ranks anew keeps its store, and each of
// its agents counts the restarts that it began itself, so that no variable is the same on all hosts of an
// attempt and another one in the next. Rank 0 therefore gives each attempt a name that nobody had before, and
// tells it to whoever asks; who asked in an earlier attempt has ended, and reads no answer.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include <pacer/collectives/detail/store.h>

namespace pacer::detail {

struct LaunchAttempt {
  std::shared_ptr<Store> store;  // the part of the launch's that belongs to this attempt
  // Tells the name to those who have asked since. Rank 0 calls it now and then until all ranks have come.
  std::function<void()> answer;
};

// Ranks other than 0 wait for it: throws CommunicationError where it does not come in time. `place` is for
// messages.
LaunchAttempt enter_attempt(const std::shared_ptr<Store>& store, int rank, const std::string& place,
                            std::chrono::milliseconds timeout);

}  // namespace pacer::detail
