#include "nccl/launcher.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <sstream>

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ATen/Parallel.h>
#include <c10/cuda/CUDAFunctions.h>

namespace pacer::testing {
namespace {

// Removed at the end with the files in it. Not TemporaryFolder: with LibTorch's CUDA libraries in the
// process, their copy of std::filesystem can get in the way.
class Folder {
 public:
  Folder() {
    const char* const parent = std::getenv("TMPDIR");
    path_ = std::string(parent != nullptr ? parent : "/tmp") + "/pacer-nccl-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no temporary folder: " + path_);
  }
  ~Folder() {
    if (DIR* const folder = opendir(path_.c_str())) {
      while (const dirent* entry = readdir(folder)) unlink((path_ + "/" + entry->d_name).c_str());
      closedir(folder);
    }
    rmdir(path_.c_str());
  }
  Folder(const Folder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct Child {
  pid_t pid = 0;
  int report = -1;  // read end
  std::string unread;
  bool is_running = true;
  int status = 0;
};

class Run {
 public:
  Run(const Launch& launch, int first_gpu) : launch_(launch), first_gpu_(first_gpu) {
    std::fflush(nullptr);
    for (int rank = 0; rank < launch.world; ++rank) start(rank);
  }
  ~Run() {
    for (Child& child : children_) {
      if (child.is_running) {
        kill(child.pid, SIGKILL);
        waitpid(child.pid, nullptr, 0);
      }
      close(child.report);
    }
  }
  Run(const Run&) = delete;

  int first_gpu() const { return first_gpu_; }
  int world() const { return launch_.world; }

  // True when there is nothing more to wait for.
  bool look() {
    bool is_over = true;
    for (int rank = 0; rank < launch_.world; ++rank) {
      Child& child = children_[static_cast<size_t>(rank)];
      if (child.is_running && waitpid(child.pid, &child.status, WNOHANG) == child.pid)
        child.is_running = false;
      read_report(rank, child);
      if (child.is_running && !is_lost(rank)) is_over = false;
    }
    return is_over || watch_.seconds() > launch_.scenario->seconds;
  }

  int report() {
    int failures = 0;
    const auto fail = [&](const std::string& name, const std::string& text) {
      ++failures;
      std::printf("FAIL W=%d %s | %s\n", launch_.world, name.c_str(), text.c_str());
    };
    const int reporters = launch_.world - (launch_.scenario->last_rank_is_lost ? 1 : 0);
    for (const std::string& name : names_) {
      const Result& result = results_[name];
      if (!result.problems.empty()) {
        fail(name, result.problems);
      } else if (result.passed < reporters) {
        fail(name, std::to_string(reporters - result.passed) + " ranks did not come to it");
      } else {
        std::printf("PASS W=%d %s\n", launch_.world, name.c_str());
      }
    }
    for (int rank = 0; rank < launch_.world; ++rank) {
      const Child& child = children_[static_cast<size_t>(rank)];
      if (is_lost(rank)) continue;
      const std::string who = "rank " + std::to_string(rank) + " of " + launch_.scenario->name;
      if (child.is_running) {
        fail(who, "had not ended after " + std::to_string(launch_.scenario->seconds) + " s");
      } else if (WIFSIGNALED(child.status)) {
        fail(who, "ended by signal " + std::to_string(WTERMSIG(child.status)));
      } else if (WEXITSTATUS(child.status) != 0) {
        fail(who, "ended with status " + std::to_string(WEXITSTATUS(child.status)));
      }
    }
    if (names_.empty()) fail(launch_.scenario->name, "no rank reported anything");
    std::printf("INFO W=%d %s took %.1f s\n", launch_.world, launch_.scenario->name.c_str(),
                watch_.seconds());
    std::fflush(stdout);
    return failures;
  }

 private:
  struct Result {
    int passed = 0;
    std::string problems;
  };

  bool is_lost(int rank) const { return launch_.scenario->last_rank_is_lost && rank + 1 == launch_.world; }

  void start(int rank) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error("no process");
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(3);
      close(ends[0]);
      int status = 0;
      at::set_num_threads(1);  // the ranks share the cores
      try {
        RankProcess process(rank, launch_.world, first_gpu_, folder_.path(), ends[1]);
        launch_.scenario->run(process);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d of %s: %s\n", rank, launch_.scenario->name.c_str(), error.what());
        status = 1;
      }
      std::exit(status);  // the normal way, with all destructors of libraries
    }
    close(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    Child child;
    child.pid = pid;
    child.report = ends[0];
    children_.push_back(child);
  }

  void read_report(int rank, Child& child) {
    char buffer[4096];
    for (ssize_t n = 0; (n = read(child.report, buffer, sizeof(buffer))) > 0;) {
      child.unread.append(buffer, static_cast<size_t>(n));
    }
    for (size_t end = 0; (end = child.unread.find('\n')) != std::string::npos;) {
      take_line(rank, child.unread.substr(0, end));
      child.unread.erase(0, end + 1);
    }
  }

  void take_line(int rank, const std::string& line) {
    const std::string kind = line.substr(0, 5), rest = line.substr(5);
    if (kind == "INFO ") {
      std::printf("INFO W=%d rank %d: %s\n", launch_.world, rank, rest.c_str());
      return;
    }
    const std::string name = rest.substr(0, rest.find(" | "));
    if (results_.count(name) == 0) names_.push_back(name);
    Result& result = results_[name];
    if (kind == "PASS ") {
      ++result.passed;
    } else {
      result.problems += "rank " + std::to_string(rank) + ": " + rest.substr(name.size() + 3) + "; ";
    }
  }

  const Launch launch_;
  const int first_gpu_;
  const Folder folder_;
  const Stopwatch watch_;
  std::vector<Child> children_;
  std::vector<std::string> names_;
  std::map<std::string, Result> results_;
};

// The first of `world` neighbouring GPUs that no run uses, or -1.
int find_gpus(const std::vector<std::unique_ptr<Run>>& runs, int world, int gpus) {
  for (int first = 0; first + world <= gpus; first += world) {
    bool is_free = true;
    for (const auto& run : runs) {
      is_free = is_free && (first + world <= run->first_gpu() || run->first_gpu() + run->world() <= first);
    }
    if (is_free) return first;
  }
  return -1;
}

}  // namespace

int run_launches(const std::vector<Launch>& launches, int gpus) {
  std::deque<Launch> waiting(launches.begin(), launches.end());
  std::vector<std::unique_ptr<Run>> runs;
  int failures = 0;
  while (!waiting.empty() || !runs.empty()) {
    for (size_t i = 0; i < waiting.size();) {
      const int first_gpu = find_gpus(runs, waiting[i].world, gpus);
      if (first_gpu < 0) break;  // in order, so that nobody waits for ever
      runs.push_back(std::make_unique<Run>(waiting[i], first_gpu));
      waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (size_t i = 0; i < runs.size();) {
      if (runs[i]->look()) {
        failures += runs[i]->report();
        runs.erase(runs.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    usleep(10000);
  }
  return failures;
}

int count_gpus() {
  const pid_t pid = fork();
  if (pid == 0) _exit(c10::cuda::device_count());
  int status = 0;
  if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return 0;
  return WEXITSTATUS(status);
}

}  // namespace pacer::testing
