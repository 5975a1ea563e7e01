// What ranks measure together.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>

#include "device.h"

namespace bench {

using World = std::shared_ptr<pacer::Communicator>;

// The value of each rank, on all of them.
inline std::vector<double> over_ranks(pacer::Communicator& world, double value) {
  std::vector<double> values;
  for (const std::string& text : world.exchange(std::to_string(value))) {
    values.push_back(std::atof(text.c_str()));
  }
  return values;
}

inline double largest(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

// Milliseconds per call on the slowest rank, calls following one another: the median over the rounds.
inline double slowest(pacer::Communicator& world, int64_t rounds, int64_t calls,
                      const std::function<void()>& f) {
  for (int i = 0; i < 3; ++i) f();
  std::vector<double> times;
  for (int64_t round = 0; round < rounds; ++round) {
    synchronize(world.device());
    world.barrier();
    const double milliseconds = milliseconds_of(world.device(), [&] {
      for (int64_t i = 0; i < calls; ++i) f();
    });
    times.push_back(largest(over_ranks(world, milliseconds / static_cast<double>(calls))));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace bench
