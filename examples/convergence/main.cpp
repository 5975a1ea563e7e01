// convergence: trains a small byte-level GPT once per arm and seed and compares the arms. Only the exit codes
// and the start of several processes are here: 0 for success, 1 for a failure while running, 2 for input that
// cannot work, 3 where other ranks went away.
#include "machine.h"
#include "options.h"
#include "study.h"
#include "support/processes.h"
#include "support/program.h"

int main(int argument_count, char** arguments) {
  return examples::run_guarded("convergence", [&] {
    auto settings = convergence::read_settings(argument_count, arguments);
    if (!settings) return 0;
    settings->processes = convergence::choose_processes(*settings);
    convergence::check_settings(*settings);
    if (settings->processes > 1 && !examples::started_processes()) convergence::check_study(*settings);
    const auto exit_code = examples::run_processes(static_cast<int>(settings->processes), arguments);
    if (exit_code) return *exit_code;
    convergence::run_study(*settings);
    return 0;
  });
}
