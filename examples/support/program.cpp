#include "support/program.h"

#include <cstdio>
#include <exception>

#include <c10/util/Exception.h>

#include <pacer/collectives/communication_error.h>
#include <pacer/core/error.h>

#include "support/command_line.h"
#include "support/processes.h"

namespace examples {
namespace {

// A warning of the library as one line for who watches, without the place in the code that LibTorch's own
// handler puts around it.
class WarningLines : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    std::fprintf(stderr, "warning: %s\n", warning.msg().c_str());
  }
};

}  // namespace

int run_guarded(const std::string& program, const std::function<int()>& body,
                const std::function<void(const std::string&)>& on_failure) {
  WarningLines warning_lines;
  const c10::WarningUtils::WarningHandlerGuard guard(&warning_lines);
  std::string sentence;
  int exit_code = kFailed;
  try {
    return body();
  } catch (const pacer::CommunicationError& error) {
    sentence = error.what();
    exit_code = kPeersFailed;
  } catch (const pacer::InvalidArgument& error) {
    sentence = error.what();
    exit_code = kBadInput;
  } catch (const c10::Error& error) {
    sentence = error.what_without_backtrace();
  } catch (const std::exception& error) {
    sentence = error.what();
  }
  if (on_failure) on_failure(sentence);
  std::fflush(stdout);
  std::fprintf(stderr, "%s: %s\n", program.c_str(), sentence.c_str());
  return exit_code;
}

int run_as_ranks(int argument_count, char** arguments, const char* about,
                 const std::function<void(const std::shared_ptr<pacer::Communicator>&)>& body,
                 const pacer::CommunicatorOptions& options) {
  return run_guarded(program_name(arguments), [&] {
    constexpr int kMost = 1024;
    auto known = make_options();
    known.add_options()("processes", boost::program_options::value<int>()->value_name("N")->default_value(1),
                        "ranks to start on this machine; leave it out under torchrun, mpirun or srun");
    const auto given = read_command_line(argument_count, arguments, about, known);
    if (!given) return 0;
    const auto exit_code = run_processes(value_in<int>(*given, "processes", 1, kMost), arguments);
    if (exit_code) return *exit_code;
    body(join_processes(options));
    return 0;
  });
}

int run_program(int argument_count, char** arguments, const char* about, const std::function<void()>& body) {
  return run_guarded(program_name(arguments), [&] {
    if (read_command_line(argument_count, arguments, about, make_options())) body();
    return 0;
  });
}

}  // namespace examples
