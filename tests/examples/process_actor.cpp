// What processes.py watches: a program that runs in several processes and then does as it is told.
//
//   process_actor COUNT end            rank 0 says on stdout, every rank on stderr, what it was given; all
//                                      end well
//   process_actor COUNT join           the ranks meet and add up 1 + their numbers
//   process_actor COUNT fail R HOW     rank R: HOW is an exit code, or "kill"; the others meet their end by
//                                      waiting
//   process_actor COUNT deaf R CODE    the same, but the others do not listen to SIGTERM
//   process_actor COUNT peers R CODE   rank R ends after a while, the others before it with kPeersFailed
//   process_actor COUNT wait           all wait for ever
//
// Each rank writes its process id to stderr before it waits.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <ATen/ops/full.h>
#include <unistd.h>

#include <pacer/core/error.h>

#include "support/processes.h"

namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int act(const std::vector<std::string>& words, int rank) {
  const std::string& mode = words[2];
  if (mode == "join") {
    const auto world =
        examples::join_processes(pacer::CommunicatorOptions().backend(pacer::CommunicatorBackend::gloo));
    const auto sum = at::full({1}, world->rank() + 1, at::kLong);
    world->all_reduce(sum).wait();
    std::fprintf(stderr, "sum %lld, %d ranks\n", static_cast<long long>(sum.item<int64_t>()),
                 world->world_size());
    return 0;
  }
  std::printf("stdout of rank %d\n", rank);
  std::fprintf(stderr, "pid %d threads %s folder %s\nunfinished line", static_cast<int>(getpid()),
               variable("OMP_NUM_THREADS").c_str(), variable("PACER_PROCESS_FILE").c_str());
  if (mode == "end") return 0;
  std::fprintf(stderr, "\n");
  std::fflush(stdout);
  const bool chosen = words.size() > 4 && rank == std::stoi(words[3]);
  if (mode == "deaf" && !chosen) std::signal(SIGTERM, SIG_IGN);
  const std::string started = variable("PACER_PROCESS_FILE") + "-started";  // made by the chosen rank
  if (mode == "peers" && !chosen) {
    while (access(started.c_str(), F_OK) != 0) usleep(10'000);
    return examples::kPeersFailed;
  }
  if (chosen) {
    std::ofstream(started).flush();
    usleep(300'000);
    if (words[4] == "kill") std::raise(SIGKILL);
    return std::stoi(words[4]);
  }
  for (;;) pause();
}

}  // namespace

int main(int argument_count, char** arguments) {
  const std::vector<std::string> words(arguments, arguments + argument_count);
  if (words.size() < 3) return 2;
  try {
    if (const auto exit_code = examples::run_processes(std::stoi(words[1]), arguments)) return *exit_code;
    const std::string rank = variable("PACER_PROCESS_RANK");
    return act(words, rank.empty() ? 0 : std::stoi(rank));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "process_actor: %s\n", error.what());
    return 1;
  }
}
