// Time of what ranks do together.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <torch/cuda.h>

#include <pacer/collectives/communicator.h>

#include "timing.h"

namespace bench {

// Milliseconds per call on the slowest rank, calls following one another: the median over the rounds.
inline double slowest(pacer::Communicator& world, int rounds, int calls, const std::function<void()>& f) {
  const auto synchronize = [&] {
    if (world.device().is_cuda()) torch::cuda::synchronize(world.device().index());
  };
  for (int i = 0; i < 3; ++i) f();
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    synchronize();
    world.barrier();
    const Stopwatch watch;
    for (int i = 0; i < calls; ++i) f();
    synchronize();
    double worst = 0;
    for (const std::string& text : world.exchange(std::to_string(watch.milliseconds() / calls))) {
      worst = std::max(worst, std::atof(text.c_str()));
    }
    times.push_back(worst);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace bench
