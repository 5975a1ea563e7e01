// The command line of a program: Boost.Program_options does the splitting, this makes sentences of what goes
// wrong and answers what all programs are asked. Ranges and meanings of values are the program's own.
//
//   program --help, --help-all        the options, in groups
//   program --print-config > a.ini    every option with its value and meaning; program --config a.ini repeats
//   source <(program --completion bash)
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <boost/program_options.hpp>

#include <pacer/core/error.h>

#include "support/nearest_name.h"

namespace examples {

using OptionValues = boost::program_options::variables_map;

// An empty group of options, in columns that fit all examples.
boost::program_options::options_description make_options(const std::string& title = "Options");

// The group of those options that every program has. --help-all shows it, --help its first line.
boost::program_options::options_description common_options();

// What was typed, and below it the lines of --config FILE; nothing where --help, --help-all, --print-config
// or
// --completion was, and then the answer is printed, for help behind `about`, whole lines.
// Throws pacer::InvalidArgument for an unknown option (with the nearest one), for an argument that is no
// option, and for a value of another type. `without_dashes`: the option whose value may be given without its
// name, as the only argument without dashes.
std::optional<OptionValues> read_command_line(int argument_count, char** arguments, const std::string& about,
                                              const boost::program_options::options_description& known,
                                              const char* without_dashes = nullptr);

// The lines of one option in an INI file: its meaning as a comment, then its value, itself a comment where it
// is empty. Throws pacer::InvalidArgument for a value that such a file cannot hold.
std::string ini_lines(const std::string& name, const std::string& value, const std::string& meaning);

// The script with which bash (zsh: after bashcompinit) completes the options of `program`: their names, and
// the values that an option's value name spells out, "cpu|cuda"; files for FILE and FOLDER. Throws
// pacer::InvalidArgument for another shell.
std::string completion_script(const std::string& shell, const std::string& program,
                              const boost::program_options::options_description& options);

// The value of an option, which must lie from `least` to `most`; `otherwise` where the option has neither a
// value nor a default.
template <class Value>
Value value_in(const OptionValues& given, const std::string& name, Value least, Value most,
               Value otherwise = {}) {
  if (given.count(name) == 0) return otherwise;
  const auto value = given[name].as<Value>();
  pacer::require(value >= least && value <= most, "--", name, " must be from ", least, " to ", most, ", not ",
                 value);
  return value;
}

// What the typed name stands for.
template <class Value>
Value choice_of(const OptionValues& given, const std::string& name,
                const std::vector<std::pair<std::string, Value>>& choices) {
  const auto typed = given[name].as<std::string>();
  std::vector<std::string> names;
  for (const auto& [choice, value] : choices) {
    if (choice == typed) return value;
    names.push_back(choice);
  }
  throw pacer::InvalidArgument("--" + name + " cannot be '" + shown(typed) + "'; " +
                               suggestion(typed, names));
}

}  // namespace examples
