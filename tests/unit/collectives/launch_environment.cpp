// What each launcher's variables mean, as they were seen under that launcher.
#include <map>
#include <optional>
#include <string>

#include <pacer/collectives/launch_environment.h>
#include <pacer/core/error.h>

#include "support/catch.h"

namespace pacer::testing {
namespace {

using Variables = std::map<std::string, std::string>;

LaunchEnvironment launched(const Variables& variables) {
  return read_launch_environment([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

// `variables` with some of them set otherwise; "-" takes one away.
Variables with(Variables variables, const Variables& others) {
  for (const auto& [name, value] : others) {
    if (value == "-") {
      variables.erase(name);
    } else {
      variables[name] = value;
    }
  }
  return variables;
}

// The message of the refusal.
std::string launch_refusal(const Variables& variables) {
  try {
    launched(variables);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

void check_ranks(const LaunchEnvironment& launch, int rank, int world_size, int local_rank, int local_size) {
  CHECK(launch.rank == rank);
  CHECK(launch.world_size == world_size);
  CHECK(launch.local_rank == local_rank);
  CHECK(launch.local_size == local_size);
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node7"},
                             {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                             {"TORCHELASTIC_RUN_ID", "none"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"}};
// mpirun -np 4 of Open MPI 4.1 on one host.
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},          {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},    {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"PMIX_NAMESPACE", "prterun-host-7@1"}, {"PMIX_RANK", "2"}};
const Variables kMpich = {{"PMI_RANK", "1"},
                          {"PMI_SIZE", "2"},
                          {"MPI_LOCALRANKID", "1"},
                          {"MPI_LOCALNRANKS", "2"},
                          {"PMI_JOBID", "kvs_1_2"}};
// srun of 7 tasks on 4 nodes, 2 on each but the last.
const Variables kSlurm = {{"SLURM_JOB_ID", "70123"},
                          {"SLURM_STEP_ID", "3"},
                          {"SLURM_PROCID", "4"},
                          {"SLURM_LOCALID", "0"},
                          {"SLURM_NODEID", "2"},
                          {"SLURM_NTASKS", "7"},
                          {"SLURM_STEP_NUM_TASKS", "7"},
                          {"SLURM_STEP_NUM_NODES", "4"},
                          {"SLURM_STEP_NODELIST", "node[003-005,9],b1"},
                          {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"}};
const Variables kSlurmOneHost = with(kSlurm, {{"SLURM_STEP_NUM_NODES", "1"},
                                              {"SLURM_STEP_NODELIST", "node003"},
                                              {"SLURM_NODEID", "0"},
                                              {"SLURM_LOCALID", "4"},
                                              {"SLURM_STEP_TASKS_PER_NODE", "7"}});

}  // namespace

TEST_CASE("without a launcher there is one process", "[launch]") {
  for (const Variables& variables :
       {Variables(), Variables{{"MASTER_ADDR", "node7"}, {"LOCAL_RANK", "3"}, {"RANK", ""}}}) {
    const LaunchEnvironment launch = launched(variables);
    CHECK(launch.launcher.empty());
    CHECK(launch.host.empty());
    check_ranks(launch, 0, 1, 0, 1);
  }
}

TEST_CASE("torchrun says everything", "[launch]") {
  const LaunchEnvironment launch = launched(kTorchrun);
  CHECK(launch.launcher == "torchrun");
  check_ranks(launch, 5, 8, 1, 4);
  CHECK(launch.host == "node7");
  CHECK(launch.port == 29500);
  CHECK(launch.store_is_hosted);
  // Each host's agent counts the restarts that it began: ranks of one attempt may see other counts.
  CHECK(launch.job == launched(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "3"}})).job);
  CHECK_FALSE(launched(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "-"}})).store_is_hosted);
  CHECK_FALSE(launched(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).store_is_hosted);
}

TEST_CASE("torchrun's variables can be set by hand, without the local ones", "[launch]") {
  const LaunchEnvironment launch =
      launched({{"RANK", "1"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
  check_ranks(launch, 1, 3, 1, 3);
  check_ranks(launched({{"RANK", "0"}, {"WORLD_SIZE", "1"}}), 0, 1, 0, 1);
}

TEST_CASE("Open MPI's ranks of one host meet through a file, unless an address is set", "[launch]") {
  const LaunchEnvironment launch = launched(kOpenMpi);
  CHECK(launch.launcher == "Open MPI");
  check_ranks(launch, 2, 4, 2, 4);
  CHECK(launch.host.empty());
  CHECK(launch.job == "openmpi-prterun-host-7_1");

  const LaunchEnvironment named =
      launched(with(kOpenMpi, {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "4000"}}));
  CHECK(named.host == "127.0.0.1");
  CHECK(named.port == 4000);
  CHECK_FALSE(named.store_is_hosted);

  const Variables several = with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "3"}});
  CHECK_THAT(launch_refusal(several),
             Catch::Matchers::ContainsSubstring("set MASTER_ADDR to the host of rank 0"));
  check_ranks(launched(with(several, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "4000"}})), 2, 4, 2, 3);
}

TEST_CASE("a launch without a name cannot meet through a file", "[launch]") {
  CHECK_THAT(launch_refusal(with(kOpenMpi, {{"PMIX_NAMESPACE", "-"}})),
             Catch::Matchers::ContainsSubstring("set MASTER_ADDR to 127.0.0.1"));
  CHECK(launched(with(kOpenMpi, {{"PMIX_NAMESPACE", "-"}, {"OMPI_MCA_ess_base_jobid", "81"}})).job ==
        "openmpi-81");
  CHECK_THAT(launch_refusal(with(kMpich, {{"PMI_JOBID", "-"}})), Catch::Matchers::ContainsSubstring("MPICH"));
}

TEST_CASE("the name of a launch is the name of a file in one folder", "[launch]") {
  const std::string job =
      launched(with(kOpenMpi, {{"PMIX_NAMESPACE", "../a b/" + std::string(500, 'x')}})).job;
  CHECK(job.rfind("openmpi-.._a_b_xxx", 0) == 0);
  CHECK(job.size() < 200);
}

TEST_CASE("MPICH and its relatives", "[launch]") {
  const LaunchEnvironment launch = launched(kMpich);
  CHECK(launch.launcher == "MPICH");
  check_ranks(launch, 1, 2, 1, 2);
  CHECK(launch.job == "mpich-kvs_1_2");
}

TEST_CASE("Slurm's ranks on several hosts meet at the first one", "[launch]") {
  const LaunchEnvironment launch = launched(kSlurm);
  CHECK(launch.launcher == "Slurm");
  check_ranks(launch, 4, 7, 0, 2);
  CHECK(launch.host == "node003");
  CHECK(launch.port >= 15000);
  CHECK(launch.port < 32768);  // Linux gives those above to outgoing connections
  CHECK_FALSE(launch.store_is_hosted);
  CHECK(launch.port == launched(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}})).port);
  CHECK(launch.port != launched(with(kSlurm, {{"SLURM_STEP_ID", "4"}})).port);
  CHECK(launch.port != launched(with(kSlurm, {{"SLURM_JOB_ID", "70124"}})).port);
  check_ranks(launched(with(kSlurm, {{"SLURM_PROCID", "6"}, {"SLURM_NODEID", "3"}})), 6, 7, 0, 1);
  check_ranks(launched(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "4,0,2,1"}})), 4, 7, 0, 2);

  const LaunchEnvironment named = launched(with(kSlurm, {{"MASTER_ADDR", "x"}, {"MASTER_PORT", "2"}}));
  CHECK(named.host == "x");
  CHECK(named.port == 2);
}

TEST_CASE("Slurm's ranks on one host meet through a file", "[launch]") {
  const LaunchEnvironment launch = launched(kSlurmOneHost);
  check_ranks(launch, 4, 7, 4, 7);
  CHECK(launch.host.empty());
  CHECK(launch.job == "slurm-70123.3");
  CHECK(launched(with(kSlurmOneHost, {{"SLURM_RESTART_COUNT", "1"}})).job != launch.job);
}

TEST_CASE("the first host of Slurm's lists", "[launch]") {
  const auto first = [](const std::string& list) {
    return launched(with(kSlurm, {{"SLURM_STEP_NODELIST", list}})).host;
  };
  CHECK(first("b1,node[3-4]") == "b1");
  CHECK(first("node[9,3-4],b1") == "node9");
  CHECK(first("node[003-007]-ib") == "node003-ib");
  CHECK(first("rack[1-2]n[30-39].cluster,b1") == "rack1n30.cluster");
  CHECK(first("single") == "single");
}

TEST_CASE("Slurm without a count for each node takes the one that was asked for", "[launch]") {
  const Variables variables = with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "-"}});
  CHECK_THAT(launch_refusal(variables), Catch::Matchers::ContainsSubstring("SLURM_NTASKS_PER_NODE"));
  check_ranks(launched(with(variables, {{"SLURM_NTASKS_PER_NODE", "2"}})), 4, 7, 0, 2);
}

TEST_CASE("a batch script and an interactive shell of Slurm run one process", "[launch]") {
  // Both have SLURM_NTASKS, and SLURM_PROCID 0, without being a step of srun.
  for (const char* step : {"-", "4294967291", "4294967290", "4294967292"}) {
    const LaunchEnvironment launch = launched(with(kSlurm, {{"SLURM_STEP_ID", step}, {"SLURM_PROCID", "0"}}));
    CHECK(launch.launcher.empty());
    check_ranks(launch, 0, 1, 0, 1);
  }
  CHECK(launched(with(kSlurm, {{"SLURM_PROCID", "-"}})).launcher.empty());
  // The older name of the variable.
  CHECK(launched(with(kSlurm, {{"SLURM_STEP_ID", "-"}, {"SLURM_STEPID", "3"}})).launcher == "Slurm");
}

TEST_CASE("of several launchers the innermost one counts", "[launch]") {
  Variables all = with(kSlurmOneHost, kMpich);
  CHECK(launched(all).launcher == "MPICH");
  all = with(all, kOpenMpi);
  CHECK(launched(all).launcher == "Open MPI");
  all = with(all, kTorchrun);
  CHECK(launched(all).launcher == "torchrun");
  // srun --mpi=pmi2 speaks MPICH's protocol and sets two of its variables.
  CHECK(launched(with(kSlurm, {{"PMI_RANK", "4"}, {"PMI_SIZE", "7"}, {"PMI_JOBID", "1"}})).launcher ==
        "Slurm");
  // mpirun in a batch script.
  CHECK(launched(with(kOpenMpi, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}})).launcher == "Open MPI");
}

TEST_CASE("DeepSpeed's launcher sets LOCAL_SIZE", "[launch]") {
  const Variables deepspeed = with(kTorchrun, {{"LOCAL_WORLD_SIZE", "-"},
                                               {"LOCAL_SIZE", "4"},
                                               {"CROSS_RANK", "1"},
                                               {"TORCHELASTIC_USE_AGENT_STORE", "-"}});
  check_ranks(launched(deepspeed), 5, 8, 1, 4);
  CHECK_THAT(launch_refusal(with(deepspeed, {{"LOCAL_RANK", "-"}})),
             Catch::Matchers::ContainsSubstring("LOCAL_RANK"));
  // torchrun's own is the better one.
  check_ranks(launched(with(kTorchrun, {{"LOCAL_SIZE", "2"}})), 5, 8, 1, 4);
}

TEST_CASE("a batch script may export the size of the world for its srun", "[launch]") {
  const LaunchEnvironment launch =
      launched(with(kSlurm, {{"WORLD_SIZE", "7"}, {"MASTER_ADDR", "node003"}, {"MASTER_PORT", "4711"}}));
  CHECK(launch.launcher == "Slurm");
  check_ranks(launch, 4, 7, 0, 2);
  CHECK(launch.host == "node003");
  CHECK(launch.port == 4711);
  // Where each task has a rank, too, the variables are of a launcher inside it.
  CHECK(launched(with(kSlurm, kTorchrun)).launcher == "torchrun");
}

TEST_CASE("incomplete sets are refused by the name of what is missing", "[launch]") {
  const std::map<std::string, Variables> needed = {
      {"RANK", kTorchrun},
      {"WORLD_SIZE", kTorchrun},
      {"LOCAL_RANK", kTorchrun},
      {"LOCAL_WORLD_SIZE", kTorchrun},
      {"MASTER_ADDR", kTorchrun},
      {"MASTER_PORT", kTorchrun},
      {"OMPI_COMM_WORLD_RANK", kOpenMpi},
      {"OMPI_COMM_WORLD_SIZE", kOpenMpi},
      {"OMPI_COMM_WORLD_LOCAL_RANK", kOpenMpi},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", kOpenMpi},
      {"PMI_RANK", kMpich},
      {"PMI_SIZE", kMpich},
      {"MPI_LOCALRANKID", kMpich},
      {"MPI_LOCALNRANKS", kMpich},
      {"SLURM_LOCALID", kSlurm},
      {"SLURM_JOB_ID", kSlurm},
      {"SLURM_STEP_NODELIST", kSlurm},
      {"SLURM_NODEID", kSlurm},
  };
  for (const auto& [name, variables] : needed) {
    CAPTURE(name);
    CHECK_THAT(launch_refusal(with(variables, {{name, "-"}})), Catch::Matchers::ContainsSubstring(name));
    CHECK_THAT(launch_refusal(with(variables, {{name, ""}})), Catch::Matchers::ContainsSubstring(name));
  }
  CHECK_THAT(launch_refusal(with(kOpenMpi, {{"MASTER_PORT", "3"}})),
             Catch::Matchers::ContainsSubstring("MASTER_ADDR is not"));
}

TEST_CASE("values that are no numbers or do not fit are refused by name", "[launch]") {
  const auto check = [](const Variables& variables, const std::string& name, const std::string& value) {
    CAPTURE(name, value);
    CHECK_THAT(launch_refusal(with(variables, {{name, value}})), Catch::Matchers::ContainsSubstring(name));
  };
  for (const char* value : {"x", "1x", " 1", "+1", "1.0", "-1", "8", "99999999999999999999"}) {
    check(kTorchrun, "RANK", value);
    check(kTorchrun, "LOCAL_RANK", value);
    check(with(kSlurm, {{"SLURM_NODEID", "0"}}), "SLURM_PROCID", value);
  }
  for (const char* value : {"0", "-3", "x", "99999999"}) check(kTorchrun, "WORLD_SIZE", value);
  for (const char* value : {"0", "65536", "-1", "http"}) check(kTorchrun, "MASTER_PORT", value);
  for (const char* value : {"0", "9"}) check(kTorchrun, "LOCAL_WORLD_SIZE", value);
  check(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_RANK", "4");
  check(kMpich, "PMI_RANK", "2");
  for (const char* value : {"", "x", "2(x", "2(x)", "2(x3", "2(x3)x", "2,,", "2(x1)"}) {
    check(kSlurm, "SLURM_STEP_TASKS_PER_NODE", *value == 0 ? "," : value);
  }
}

}  // namespace pacer::testing
