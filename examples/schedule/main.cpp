// pacer-schedule: what the schedules of a run do to rate, batch, length and layers, step by step, before anybody
// pays for it. Exit codes: 0 for success, 1 where a file cannot be written, 2 for input that cannot work.
#include <cstdio>
#include <string>

#include "options.h"
#include "report.h"
#include "support/command_line.h"
#include "support/program.h"
#include "support/svg.h"
#include "support/whole_file.h"

namespace {

int run(int argument_count, char** arguments) {
  const auto given = examples::read_command_line(
      argument_count, arguments,
      "Prints what the schedules of a run do: each row is the step behind so many others, with the tokens "
      "before\n"
      "it. Numbers of steps and tokens may be written as 4e9.\n\n"
      "  pacer-schedule --steps 10000 --learning-rate 3e-4 --schedule stable-decay --warmup 500 "
      "--decay-steps 2000\n"
      "  pacer-schedule --tokens 4e9 --tokens-per-step 262144 --by-tokens --batch 4,2000:8 --svg run.svg\n",
      schedule::known_options());
  if (!given) return 0;
  const schedule::Run run = schedule::read_run(*given);
  const schedule::Course course = schedule::follow(run);
  const auto columns = schedule::columns_of(run);
  std::printf("%s\n%s", schedule::table_text(columns, course.table).c_str(),
              schedule::summary_text(run, course).c_str());
  if (given->count("csv") != 0) {
    examples::write_whole_file((*given)["csv"].as<std::string>(), schedule::csv_text(columns, course.points));
  }
  if (given->count("svg") != 0) {
    const bool over_tokens = given->count("over-tokens") != 0 && (*given)["over-tokens"].as<bool>();
    examples::svg::save((*given)["svg"].as<std::string>(),
                        schedule::drawing(columns, course, over_tokens ? "tokens" : "step"));
  }
  return 0;
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded("pacer-schedule", [&] { return run(argument_count, arguments); });
}
