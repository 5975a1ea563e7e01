// The variables that launchers set: the input has a line NAME=VALUE for each.
#include <map>
#include <sstream>

#include <pacer/collectives/launch_environment.h>

#include "fuzz/harness.h"

namespace pacer::fuzz {
namespace {

std::map<std::string, std::string> variables_of(const std::string& text) {
  std::map<std::string, std::string> variables;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    // As in a real environment, no value holds a NUL.
    if (equals != std::string::npos) variables[line.substr(0, equals)] = line.substr(equals + 1).c_str();
  }
  return variables;
}

void check(const LaunchEnvironment& launch) {
  demand(launch.world_size >= 1 && launch.rank >= 0 && launch.rank < launch.world_size,
         "a rank is outside its world");
  demand(launch.local_size >= 1 && launch.local_size <= launch.world_size && launch.local_rank >= 0 &&
             launch.local_rank < launch.local_size,
         "a local rank is outside its host");
  demand(launch.host.empty() ? launch.port == 0 : launch.port >= 1 && launch.port <= 65535,
         "a port cannot be");
  demand(launch.world_size == 1 || !launch.host.empty() || !launch.job.empty(),
         "ranks have no place to meet");
  for (const char c : launch.job) {
    const bool allowed = ('0' <= c && c <= '9') || ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') ||
                         c == '-' || c == '_' || c == '.';
    demand(allowed, "the name of a job is no name of a file");
  }
}

}  // namespace

std::vector<std::string> seeds() {
  return {
      "RANK=1\nWORLD_SIZE=4\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=10.0.0.1\nMASTER_PORT=29500\n"
      "TORCHELASTIC_USE_AGENT_STORE=True\nTORCHELASTIC_RUN_ID=none\nTORCHELASTIC_RESTART_COUNT=0\n",
      "RANK=0\nWORLD_SIZE=2\nLOCAL_RANK=0\nLOCAL_SIZE=2\nMASTER_ADDR=localhost\nMASTER_PORT=1\n",
      "RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=h\nMASTER_PORT=65535\n",
      "OMPI_COMM_WORLD_SIZE=4\nOMPI_COMM_WORLD_RANK=3\nOMPI_COMM_WORLD_LOCAL_SIZE=4\n"
      "OMPI_COMM_WORLD_LOCAL_RANK=3\nPMIX_NAMESPACE=prterun-host-1@1\n",
      "PMI_SIZE=2\nPMI_RANK=1\nMPI_LOCALNRANKS=2\nMPI_LOCALRANKID=1\nPMI_JOBID=kvs_1_0\n",
      "SLURM_STEP_ID=0\nSLURM_PROCID=5\nSLURM_NTASKS=6\nSLURM_STEP_NUM_TASKS=6\nSLURM_LOCALID=1\n"
      "SLURM_STEP_TASKS_PER_NODE=2(x3)\nSLURM_NODEID=2\nSLURM_JOB_ID=77\n"
      "SLURM_STEP_NODELIST=node[003-007,9]-ib,b1\nSLURM_RESTART_COUNT=1\n",
      "SLURM_STEP_ID=0\nSLURM_PROCID=0\nSLURM_NTASKS=2\nSLURM_STEP_NUM_NODES=1\nSLURM_LOCALID=0\n"
      "SLURM_JOB_ID=9223372036854775807\n"};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pacer;
  const auto variables = fuzz::variables_of(fuzz::text_of(data, size));
  const EnvironmentReader read = [&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
  LaunchEnvironment launch;
  if (fuzz::accepts(size, [&] { launch = read_launch_environment(read); })) fuzz::check(launch);
  return 0;
}
