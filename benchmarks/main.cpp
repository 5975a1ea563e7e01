// pacer-bench SUBCOMMAND [options]: one program for all measurements. Exit codes: 0 for success, 1 for a
// failure, 2 for input that cannot work, 3 where only other ranks failed.
#include <string>
#include <vector>

#include <pacer/core/error.h>

#include "subcommands.h"
#include "support/program.h"  // of examples/

namespace {

std::vector<bench::Subcommand> all_subcommands() {
  return {bench::kernels::subcommand(),    bench::cpu::subcommand(),      bench::session::subcommand(),
          bench::checkpoint::subcommand(), bench::overlap::subcommand(),  bench::onebit::subcommand(),
          bench::sharding::subcommand(),   bench::lora::subcommand(),     bench::nf4::subcommand(),
          bench::paging::subcommand(),     bench::pipeline::subcommand(), bench::muon::subcommand(),
          bench::layers::subcommand(),     bench::rows::subcommand(),     bench::lm::subcommand(),
          bench::loss::subcommand()};
}

std::string about(const std::vector<bench::Subcommand>& all) {
  std::string text =
      "Measures pacer beside named peers in the same run.\n\n  pacer-bench SUBCOMMAND [options]\n\n";
  for (const auto& one : all) {
    text += "  " + one.name + std::string(12 - one.name.size(), ' ') + one.summary + "\n";
  }
  return text + "\npacer-bench SUBCOMMAND --help lists the options of a subcommand.\n";
}

const bench::Subcommand& named(const std::vector<bench::Subcommand>& all, const std::string& name) {
  std::vector<std::string> names;
  for (const auto& one : all) {
    if (one.name == name) return one;
    names.push_back(one.name);
  }
  throw pacer::InvalidArgument("there is no subcommand '" + examples::shown(name) + "'; " +
                               examples::suggestion(name, names));
}

// `program` becomes "pacer-bench SUBCOMMAND", as which messages, help and files of options name it.
int run(int argument_count, char** arguments, std::string& program) {
  const auto all = all_subcommands();
  if (argument_count < 2 || arguments[1][0] == '-') {
    const auto given =
        examples::read_command_line(argument_count, arguments, about(all), examples::make_options(""));
    pacer::require(!given, "which subcommand? --help lists them");
    return 0;
  }
  const auto& chosen = named(all, arguments[1]);
  program += " " + chosen.name;
  std::vector<char*> rest(arguments + 1, arguments + argument_count + 1);  // with the null pointer at the end
  rest[0] = program.data();
  const auto given = examples::read_command_line(argument_count - 1, rest.data(), chosen.about,
                                                 chosen.options, chosen.without_dashes);
  return given ? chosen.run(*given) : 0;
}

}  // namespace

int main(int argument_count, char** arguments) {
  std::string program = examples::program_name(arguments);
  return examples::run_guarded(program, [&] { return run(argument_count, arguments, program); });
}
