// The dialects of the launchers. Where one was started by another, the variables of both are there; the
// innermost one made this process: torchrun before mpirun, and mpirun before the batch job it runs in.
#include <pacer/collectives/launch_environment.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <limits>

#include <pacer/core/error.h>
#include <pacer/files/json_scanner.h>

namespace pacer {
namespace {

// Slurm's steps that are no srun: of a batch script, of an interactive shell, and others.
constexpr int64_t kFirstSpecialStep = 4294967290;
// Ports for steps, below those that Linux gives to outgoing connections.
constexpr int64_t kFirstPort = 15000;
constexpr int64_t kPorts = 17000;
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

class Variables {
 public:
  explicit Variables(const EnvironmentReader& read) : read_(read) {}

  // Empty counts as absent: that is how people unset things.
  std::optional<std::string> find(const char* name) const {
    std::optional<std::string> value = read_(name);
    if (value && value->empty()) value.reset();
    return value;
  }
  bool has(const char* name) const { return find(name).has_value(); }

  // The first of them that is there.
  std::string any_of(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (const auto value = find(name)) return *value;
    }
    return "";
  }

  // Throws InvalidArgument where it is missing.
  std::string text(const char* launcher, const char* name) const {
    const std::optional<std::string> value = find(name);
    require(value.has_value(), "this process looks as if ", launcher, " had started it, but ", name,
            " is not set; start it by ", launcher, ", or unset the other variables of ", launcher);
    return *value;
  }

  int64_t number(const char* launcher, const char* name, int64_t from, int64_t to) const {
    return parse(name, text(launcher, name), from, to);
  }

  static int64_t parse(const char* name, const std::string& value, int64_t from, int64_t to) {
    int64_t result = 0;
    const char* const end = value.data() + value.size();
    const auto [rest, error] = std::from_chars(value.data(), end, result);
    require(error == std::errc() && rest == end, "the environment variable ", name, " is ",
            quote_for_message(value), ", which is no number; set it to one, or unset it");
    require(result >= from && result <= to, "the environment variable ", name, " is ", value,
            ", but must be ",
            to == kNoLimit ? detail::concatenate("at least ", from) : detail::concatenate(from, " to ", to),
            "; correct or unset it");
    return result;
  }

 private:
  const EnvironmentReader& read_;
};

// As a name of a file: anything else than letters, digits, '-', '_' and '.' becomes '_'.
std::string as_job(std::string text) {
  constexpr size_t kLongest = 128;
  text.resize(std::min(text.size(), kLongest));
  for (char& c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-' && c != '_' && c != '.') c = '_';
  }
  return text;
}

// Rank and size in the world and on the host, each from a variable.
void read_ranks(const Variables& variables, LaunchEnvironment& launch, const char* size, const char* rank,
                const char* local_size, const char* local_rank) {
  constexpr int64_t kMost = 1 << 24;
  const char* launcher = launch.launcher.c_str();
  launch.world_size = static_cast<int>(variables.number(launcher, size, 1, kMost));
  launch.rank = static_cast<int>(variables.number(launcher, rank, 0, launch.world_size - 1));
  launch.local_size = static_cast<int>(variables.number(launcher, local_size, 1, launch.world_size));
  launch.local_rank = static_cast<int>(variables.number(launcher, local_rank, 0, launch.local_size - 1));
}

// The address, if there is one. True where there is.
bool read_address(const Variables& variables, LaunchEnvironment& launch) {
  if (!variables.has("MASTER_ADDR")) {
    require(!variables.has("MASTER_PORT"),
            "MASTER_PORT is set but MASTER_ADDR is not; set both, to where rank 0 shall listen, or none");
    return false;
  }
  require(variables.has("MASTER_PORT"),
          "MASTER_ADDR is set but MASTER_PORT is not; set both, to where rank 0 shall listen, or none");
  launch.host = *variables.find("MASTER_ADDR");
  launch.port = static_cast<int>(Variables::parse("MASTER_PORT", *variables.find("MASTER_PORT"), 1, 65535));
  return true;
}

// For launchers that say nothing of an address: by a file on one host, else refused.
void read_meeting_place(const Variables& variables, LaunchEnvironment& launch, const std::string& job) {
  launch.job = as_job(job);
  if (launch.world_size == 1 || read_address(variables, launch)) return;
  require(
      launch.local_size == launch.world_size, launch.launcher, " started ", launch.world_size,
      " ranks on several hosts, but does not say where they can meet; set MASTER_ADDR to the host of rank 0 "
      "and MASTER_PORT to a free port there, for all ranks");
  require(!job.empty(), launch.launcher,
          " has given this launch no name by which its ranks could meet; set MASTER_ADDR to 127.0.0.1 and "
          "MASTER_PORT to a free port, for all ranks");
}

LaunchEnvironment read_torchrun(const Variables& variables) {
  LaunchEnvironment launch;
  launch.launcher = "torchrun";
  const bool is_deepspeed = variables.has("LOCAL_SIZE") && !variables.has("LOCAL_WORLD_SIZE");
  if (variables.has("LOCAL_RANK") || variables.has("LOCAL_WORLD_SIZE") || is_deepspeed) {
    read_ranks(variables, launch, "WORLD_SIZE", "RANK", is_deepspeed ? "LOCAL_SIZE" : "LOCAL_WORLD_SIZE",
               "LOCAL_RANK");
  } else {  // set by hand; whether they share a host turns out when they meet
    read_ranks(variables, launch, "WORLD_SIZE", "RANK", "WORLD_SIZE", "RANK");
  }
  if (launch.world_size == 1) return launch;
  require(read_address(variables, launch),
          "RANK and WORLD_SIZE are set but MASTER_ADDR is not; set MASTER_ADDR "
          "and MASTER_PORT to where rank 0 shall listen, or start with torchrun");
  launch.store_is_hosted = variables.find("TORCHELASTIC_USE_AGENT_STORE") == "True";
  // The same in all attempts: TORCHELASTIC_RESTART_COUNT counts restarts that this host's agent began.
  launch.job = as_job("torchrun-" + variables.any_of({"TORCHELASTIC_RUN_ID"}));
  return launch;
}

LaunchEnvironment read_open_mpi(const Variables& variables) {
  LaunchEnvironment launch;
  launch.launcher = "Open MPI";
  read_ranks(variables, launch, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK");
  const std::string name = variables.any_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"});
  read_meeting_place(variables, launch, name.empty() ? "" : "openmpi-" + name);
  return launch;
}

LaunchEnvironment read_mpich(const Variables& variables) {
  LaunchEnvironment launch;
  launch.launcher = "MPICH";
  read_ranks(variables, launch, "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID");
  const std::string name = variables.any_of({"PMI_JOBID", "I_MPI_HYDRA_UUID", "PMI_PORT"});
  read_meeting_place(variables, launch, name.empty() ? "" : "mpich-" + name);
  return launch;
}

// Slurm sets most of its variables in batch scripts and interactive shells too, whose programs are one
// process.
bool is_slurm_task(const Variables& variables) {
  const std::string step = variables.any_of({"SLURM_STEP_ID", "SLURM_STEPID"});
  return !step.empty() && variables.has("SLURM_PROCID") &&
         Variables::parse("SLURM_STEP_ID", step, 0, kNoLimit) < kFirstSpecialStep;
}

// Number `node` of a list like "2(x3),1", which means 2, 2, 2, 1.
int64_t tasks_on_node(const char* name, const std::string& list, int64_t node) {
  size_t begin = 0;
  while (begin <= list.size()) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string part = list.substr(begin, end - begin);
    const size_t times = part.find("(x");
    const int64_t tasks = Variables::parse(name, part.substr(0, times), 0, kNoLimit);
    int64_t nodes = 1;
    if (times != std::string::npos) {
      require(part.back() == ')', "the environment variable ", name, " is ", quote_for_message(list),
              ", which is no list like 2(x3),1; unset it");
      nodes = Variables::parse(name, part.substr(times + 2, part.size() - times - 3), 1, kNoLimit);
    }
    if (node < nodes) return tasks;
    node -= nodes;
    begin = end + 1;
  }
  throw InvalidArgument(detail::concatenate("the environment variable ", name, " is ",
                                            quote_for_message(list),
                                            ", which does not tell of the node of this process; unset it"));
}

int64_t slurm_local_size(const Variables& variables, int64_t world_size) {
  if (variables.find("SLURM_STEP_NUM_NODES") == "1") return world_size;
  if (const auto list = variables.find("SLURM_STEP_TASKS_PER_NODE")) {
    return tasks_on_node("SLURM_STEP_TASKS_PER_NODE", *list,
                         variables.number("Slurm", "SLURM_NODEID", 0, kNoLimit));
  }
  return variables.number("Slurm", "SLURM_NTASKS_PER_NODE", 1, world_size);
}

// The first name of a list like "node[003-007,9]-ib,b1": node003-ib.
std::string first_host(const std::string& list) {
  std::string host;
  bool inside = false, skip = false;
  for (const char c : list) {
    if (c == '[') {
      inside = true;
    } else if (c == ']') {
      inside = skip = false;
    } else if (c == ',' && !inside) {
      break;
    } else if (inside && (c == '-' || c == ',')) {
      skip = true;
    } else if (!skip) {
      host += c;
    }
  }
  return host;
}

LaunchEnvironment read_slurm(const Variables& variables) {
  LaunchEnvironment launch;
  launch.launcher = "Slurm";
  constexpr int64_t kMost = 1 << 24;
  const char* const size = variables.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  const int64_t world_size = variables.number("Slurm", size, 1, kMost);
  const int64_t local_size = slurm_local_size(variables, world_size);
  require(local_size >= 1 && local_size <= world_size,
          "Slurm's variables contradict each other: ", local_size, " tasks on this node and ", size, " = ",
          world_size, "; start the program by srun");
  launch.world_size = static_cast<int>(world_size);
  launch.local_size = static_cast<int>(local_size);
  launch.rank = static_cast<int>(variables.number("Slurm", "SLURM_PROCID", 0, world_size - 1));
  launch.local_rank = static_cast<int>(variables.number("Slurm", "SLURM_LOCALID", 0, local_size - 1));
  if (launch.world_size == 1) return launch;

  const int64_t job = Variables::parse("SLURM_JOB_ID", variables.text("Slurm", "SLURM_JOB_ID"), 0, kNoLimit);
  const std::string step = variables.any_of({"SLURM_STEP_ID", "SLURM_STEPID"});
  // A requeued job keeps its number.
  const std::string restart = variables.any_of({"SLURM_RESTART_COUNT"});
  launch.job = as_job(detail::concatenate("slurm-", job, '.', step, restart.empty() ? "" : "-" + restart));
  if (read_address(variables, launch) || launch.local_size == launch.world_size) return launch;

  launch.host = first_host(variables.text("Slurm", "SLURM_STEP_NODELIST"));
  require(!launch.host.empty(),
          "SLURM_STEP_NODELIST names no host; set MASTER_ADDR and MASTER_PORT to where "
          "rank 0 shall listen");
  // Steps that run side by side must not meet each other.
  const int64_t number = job % kPorts * 31 + Variables::parse("SLURM_STEP_ID", step, 0, kNoLimit) * 977;
  launch.port = static_cast<int>(kFirstPort + number % kPorts);
  return launch;
}

}  // namespace

LaunchEnvironment read_launch_environment(const EnvironmentReader& read) {
  const Variables variables(read);
  const bool is_task = is_slurm_task(variables);
  // A batch script may export WORLD_SIZE for all tasks of its srun, which then tells them apart.
  const bool is_task_of_script = is_task && !variables.has("RANK");
  if (!is_task_of_script && (variables.has("RANK") || variables.has("WORLD_SIZE"))) {
    return read_torchrun(variables);
  }
  if (variables.has("OMPI_COMM_WORLD_RANK") || variables.has("OMPI_COMM_WORLD_SIZE")) {
    return read_open_mpi(variables);
  }
  // srun --mpi=pmi2 sets the first two as well, but not what MPICH's own mpirun says of the host.
  if ((variables.has("PMI_RANK") || variables.has("PMI_SIZE")) &&
      (!is_task || variables.has("MPI_LOCALRANKID"))) {
    return read_mpich(variables);
  }
  return is_task ? read_slurm(variables) : LaunchEnvironment();
}

LaunchEnvironment read_launch_environment() {
  return read_launch_environment([](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    if (value == nullptr) return std::nullopt;
    return value;
  });
}

}  // namespace pacer
