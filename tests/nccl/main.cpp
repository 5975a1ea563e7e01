// Tests of the NCCL transport with one process a GPU. Needs 2 GPUs or more; uses 4 where there are.
//
//   pacer-nccl-tests            everything, in less than 90 s
//   pacer-nccl-tests TEXT       scenarios whose name contains TEXT
//   pacer-nccl-tests --alone    what a single GPU can show
//   pacer-nccl-tests --list     their names
//
// One line for each check begins with PASS or FAIL; INFO lines are figures for people.
#include <cstdio>
#include <cstring>

#include <pacer/collectives/detail/connect.h>

#include "nccl/launcher.h"
#include "nccl/scenarios.h"

int main(int argc, char** argv) {
  using namespace pacer::testing;
  const char* const filter = argc > 1 ? argv[1] : "";
  const std::vector<Scenario> scenarios = {
      {"healthy", run_healthy, false, 60},
      {"stopped", run_stopped, true},
      {"before-first-use", run_stopped_before_first_use, true},
      {"killed", run_killed, true},
      {"absent", run_absent_at_set_up},
      {"abort", run_abort},
      {"trouble", run_trouble},
      {"unfinished", run_unfinished},
  };
  const Scenario again = {"again", run_again};
  if (std::strcmp(filter, "--list") == 0) {
    for (const Scenario& scenario : scenarios) std::puts(scenario.name.c_str());
    return 0;
  }
  std::string reason;
  if (!pacer::detail::has_nccl(&reason)) {
    std::printf("PACER_SKIPPED: %s\n", reason.c_str());
    return 0;
  }
  const bool is_alone = std::strcmp(filter, "--alone") == 0;
  const int gpus = count_gpus();
  if (gpus < (is_alone ? 1 : 2)) {
    std::puts(is_alone ? "PACER_SKIPPED: needs a GPU" : "PACER_SKIPPED: needs 2 GPUs");
    return 0;
  }
  if (is_alone) return run_launches({{&scenarios[0], 1}, {&again, 1}}, 1) == 0 ? 0 : 1;
  const Stopwatch watch;
  const int most = gpus >= 4 ? 4 : 2;
  std::vector<Launch> launches;
  for (const Scenario& scenario : scenarios) {
    if (scenario.name.find(filter) == std::string::npos) continue;
    // With 4 ranks some survivors are no neighbours of the one that is lost.
    const bool is_big = scenario.name == "healthy" || scenario.name == "stopped" || scenario.name == "killed";
    if (is_big && most > 2) launches.push_back({&scenario, most});
    if (!is_big || most == 2 || scenario.name == "healthy") launches.push_back({&scenario, 2});
  }
  int failures = run_launches(launches, most);
  failures += run_launches({{&again, most}}, most);
  std::printf("%s: %d failures in %.0f s\n", failures == 0 ? "PASS" : "FAIL", failures, watch.seconds());
  return failures == 0 ? 0 : 1;
}
