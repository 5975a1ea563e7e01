// Measures ways to do the same thing on all ranks at once, in turn, and adds up what the ranks saw.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>

namespace collectives {

struct Way {
  std::string name;
  std::function<void()> prepare;  // outside the clock; may be empty
  std::function<void()> run;
};

// Medians over the repetitions; one repetition begins at the same time on all ranks.
struct Timing {
  double mean = 0;     // seconds, mean over ranks
  double slowest = 0;  // seconds of the slowest rank
  int64_t repetitions = 0;
  int64_t busiest_bytes =
      0;  // sent in one repetition by the rank that sends most, as the Communicator counts
};

// How long to measure all ways together, and how often each, whatever the time.
struct Patience {
  double seconds;
  int64_t at_least;
  int64_t at_most;
};

// After one round that is not counted, runs all ways in turn, again and again: whatever slows the machine for
// a while slows all of them. The same result on every rank.
std::vector<Timing> measure(pacer::Communicator& world, const std::vector<Way>& ways,
                            const Patience& patience);

// The values of all ranks, in rank order.
std::vector<double> gather(pacer::Communicator& world, double value);

// Bytes sent so far in operations that carry data.
int64_t payload_sent(const pacer::Communicator& world);

}  // namespace collectives
