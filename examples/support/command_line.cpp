#include "support/command_line.h"

#include <iostream>

namespace examples {

namespace po = boost::program_options;

po::options_description make_options() {
  constexpr unsigned kColumns = 104, kHelpColumns = 72;
  po::options_description options("Options", kColumns, kHelpColumns);
  options.add_options()("help,h", "this text");
  return options;
}

std::optional<OptionValues> read_command_line(int argument_count, char** arguments, const std::string& about,
                                              const po::options_description& known,
                                              const char* without_dashes) {
  namespace style = po::command_line_style;
  OptionValues given;
  po::positional_options_description plain;
  if (without_dashes != nullptr) plain.add(without_dashes, 1);
  try {
    const auto parsed = po::command_line_parser(argument_count, arguments)
                            .options(known)
                            .positional(plain)
                            .style(style::unix_style & ~style::allow_guessing)
                            .run();
    po::store(parsed, given);
  } catch (const po::unknown_option& error) {
    const std::string typed = error.get_option_name();
    std::vector<std::string> names;
    for (const auto& option : known.options()) names.push_back("--" + option->long_name());
    throw pacer::InvalidArgument("unknown option '" + typed + "'; " + suggestion(typed, names));
  } catch (const po::too_many_positional_options_error&) {
    throw pacer::InvalidArgument(
        "there is an argument too many; options start with two dashes, --help lists them");
  } catch (const po::error& error) {
    throw pacer::InvalidArgument(std::string(error.what()) + "; --help lists the options");
  }
  if (given.count("help") == 0) return given;
  std::cout << about << '\n' << known << std::flush;
  return std::nullopt;
}

}  // namespace examples
