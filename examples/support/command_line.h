// The command line of a program: Boost.Program_options does the splitting, this makes sentences of what goes
// wrong and answers what all programs are asked. Ranges and meanings of values are the program's own.
//
//   program --help, --help-all        the options, in groups
//   program --print-config > a.ini    every option with its value and meaning; program --config a.ini repeats
//   source <(program --completion bash)
#pragma once

#include <functional>
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

// A switch that can also be switched off, --quick=false or PACER_QUICK=no; help shows it without a value.
// Where it is given, `variable` gets its value, unless that is null.
boost::program_options::typed_value<bool>* make_switch(bool* variable = nullptr);

// What a program with many options may add to what all programs have.
struct CommandLineExtras {
  struct Text {
    std::string name, help, text;
  };

  // --help shows these options instead of all, and behind the options these whole lines.
  const boost::program_options::options_description* in_help = nullptr;
  std::string after_help, after_help_all;
  std::vector<Text> texts;  // more options of all programs' group; each prints its text and ends
  // "PACER_": every option is also an environment variable, PACER_LEARNING_RATE for --learning-rate. Other
  // variables with this beginning are refused, unless one of `foreign_variables` is their beginning.
  std::string variables;
  std::vector<std::string> foreign_variables;
  std::function<std::string()> config;  // what --print-config writes; values are in the program's variables
};

// What was typed, below it environment variables where `extras` says so, and below these the lines of
// --config FILE; nothing where --help, --help-all, --print-config or --completion was, and then the answer is
// printed, for help behind `about`, whole lines. Values that were given, not defaults, go to the variables
// and notifiers to which the program has bound its options (boost::program_options::typed_value), in the
// order of the options; a pacer::InvalidArgument from there gets the option, its value and its source.
// Throws pacer::InvalidArgument for an unknown option (with the nearest one), for an argument that is no
// option, and for a value of another type. `without_dashes`: the options, separated by commas, whose values
// may be given in this order without their names.
std::optional<OptionValues> read_command_line(int argument_count, char** arguments, const std::string& about,
                                              const boost::program_options::options_description& known,
                                              const char* without_dashes = nullptr,
                                              const CommandLineExtras& extras = {});

// The default value of an option as a file of options has it; empty where there is none.
std::string default_text(const boost::program_options::option_description& option);

// The lines of one option in an INI file: its meaning as a comment, then its value, itself a comment where it
// is empty. Throws pacer::InvalidArgument for a value that such a file cannot hold.
std::string ini_lines(const std::string& name, const std::string& value, const std::string& meaning);

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

// The items of a list that commas separate.
std::vector<std::string> split(const std::string& list);

// What a typed name stands for; `option` is whose value it is.
template <class Value>
Value choice_named(const std::string& typed, const std::string& option,
                   const std::vector<std::pair<std::string, Value>>& choices) {
  std::vector<std::string> names;
  for (const auto& [choice, value] : choices) {
    if (choice == typed) return value;
    names.push_back(choice);
  }
  throw pacer::InvalidArgument("--" + option + " cannot be '" + shown(typed) + "'; " +
                               suggestion(typed, names));
}

// What the value of an option stands for.
template <class Value>
Value choice_of(const OptionValues& given, const std::string& name,
                const std::vector<std::pair<std::string, Value>>& choices) {
  return choice_named(given[name].as<std::string>(), name, choices);
}

// Returns what the items of a list that commas separate stand for.
template <class Value>
std::vector<Value> choices_of(const OptionValues& given, const std::string& name,
                              const std::vector<std::pair<std::string, Value>>& choices) {
  std::vector<Value> values;
  for (const std::string& item : split(given[name].as<std::string>())) {
    values.push_back(choice_named(item, name, choices));
  }
  return values;
}

}  // namespace examples
