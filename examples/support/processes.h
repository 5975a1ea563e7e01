// Several ranks of a program on one machine without a launcher:
//
//   if (const auto exit_code = examples::run_processes(8, arguments)) return *exit_code;
//   const auto world = examples::join_processes();
//
// The program that a person started becomes the parent of eight copies of itself, which know their rank from
// variables and meet through a file in a private folder. Started by torchrun, mpirun or srun instead, the
// same program joins what these have started. What is shown: rank 0's output, and everybody's errors with the
// rank in front.
#pragma once

#include <memory>
#include <optional>

#include <pacer/collectives/communicator.h>

namespace examples {

// A program's exit code where it ended only because other ranks had: the message about the failure then names
// one of those.
constexpr int kPeersFailed = 3;

// Where `count` is 1, or this process is a rank already: nothing, go on. Else starts the ranks, waits for
// all, and returns the exit code to end with: 0, or that of the first rank that failed (128 + number for a
// signal). Then the others get 5 s to end by themselves and 3 s after SIGTERM. SIGINT, SIGTERM and SIGHUP are
// passed on. No rank survives this process, and neither does the folder.
//
// Ranks have OMP_NUM_THREADS, unless it is set: the processor cores, evenly shared.
//
// Call it before anything starts threads. `arguments` as main got them. Throws pacer::InvalidArgument where a
// launcher has already started ranks, pacer::Error where the system refuses a process.
std::optional<int> run_processes(int count, char** arguments);

// How many ranks there are: as started by run_processes or a launcher; nothing where this process is alone.
// Throws pacer::InvalidArgument for a launcher's variables that contradict each other.
std::optional<int> started_processes();

// The ranks that run_processes or a launcher has started; this process alone where there are none.
std::shared_ptr<pacer::Communicator> join_processes(const pacer::CommunicatorOptions& options = {});

}  // namespace examples
