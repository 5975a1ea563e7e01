// Starts the ranks of scenarios as processes, forked before any of them uses CUDA, and gathers their reports.
// Runs side by side what fits on the GPUs. Ends only what it has started.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "nccl/rank_process.h"

namespace pacer::testing {

struct Scenario {
  std::string name;
  std::function<void(RankProcess&)> run;  // in the process of each rank
  bool last_rank_is_lost = false;         // it stops or dies on purpose; the others must end normally
  int seconds = 40;                       // what is not done by then is killed and has failed
};

struct Launch {
  const Scenario* scenario;
  int world;
};

// Prints one line for each check, and returns the number of failures.
int run_launches(const std::vector<Launch>& launches, int gpus);

// Without CUDA in this process.
int count_gpus();

}  // namespace pacer::testing
