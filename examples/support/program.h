// What the main functions of all examples have in common: --help, unknown options that are refused with the
// nearest name, and failures as one sentence behind the program's name with an exit code that says whose
// fault it was.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <pacer/collectives/communicator.h>

#include "support/program_name.h"

namespace examples {

// Exit codes of every program: 0 for success, kPeersFailed (support/processes.h) where it ended only because
// other ranks had, and these.
constexpr int kFailed = 1;    // a failure while running
constexpr int kBadInput = 2;  // input that cannot work: pacer::InvalidArgument

// Does `body` and returns its exit code; what it throws goes to stderr. `on_failure` gets the sentence first,
// to tell other ranks, for example. Meanwhile warnings of this thread are lines of their own on stderr.
int run_guarded(const std::string& program, const std::function<int()>& body,
                const std::function<void(const std::string&)>& on_failure = {});

// The whole main function of a program without options: prints `about`, some whole lines, for --help, refuses
// all other arguments, and does `body`.
int run_program(int argument_count, char** arguments, const char* about, const std::function<void()>& body);

// The whole main function of a program whose only option is --processes N: prints `about`, some whole lines,
// for --help, and each rank does `body`.
int run_as_ranks(int argument_count, char** arguments, const char* about,
                 const std::function<void(const std::shared_ptr<pacer::Communicator>&)>& body,
                 const pacer::CommunicatorOptions& options = {});

}  // namespace examples
