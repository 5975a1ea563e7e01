// Boost.Program_options does the splitting, the option table does the meaning. No other file of the
// study includes Boost.
#include "options.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iostream>
#include <map>

#include <boost/program_options.hpp>

#include <pacer/core/error.h>

#include "option_table.h"
#include "support/command_line.h"
#include "support/nearest_name.h"
#include "value_parsers.h"

namespace convergence {
namespace {

namespace po = boost::program_options;

// A value as it was given. `spelling` repeats what was typed, for errors: "--tokens 3x on the command line".
struct Given {
  std::string text;
  std::string spelling;
};
using GivenValues = std::map<std::string, Given>;

// Variables that start like ours but belong to the build, the tests, the benchmarks, or
// support/processes.cpp.
constexpr std::array<const char*, 16> kForeignVariables = {
    "PACER_BENCH",   "PACER_BUILD",    "PACER_CI",   "PACER_CUDA",     "PACER_DEPS",     "PACER_EXAMPLES",
    "PACER_INSTALL", "PACER_LIBTORCH", "PACER_NVCC", "PACER_PROCESS_", "PACER_SANITIZE", "PACER_TEST",
    "PACER_TORCH",   "PACER_UNITY",    "PACER_VENV", "PACER_WERROR"};

struct Vocabulary {
  std::vector<OptionGroup> groups;
  std::vector<std::string> names;  // settings, in the table's order

  explicit Vocabulary(const std::vector<ArmHelp>& arms) {
    std::vector<std::string> arm_names;
    for (const auto& arm : arms) arm_names.push_back(arm.name);
    groups = option_groups(arm_names);
    for (const auto& group : groups) {
      for (const auto& option : group.options) names.push_back(option.name);
    }
  }

  bool knows(const std::string& name) const {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
};

enum class Purpose { command_line, file, short_help, full_help };

po::options_description boost_options(const Vocabulary& vocabulary, Purpose purpose) {
  auto all = examples::make_options({});
  for (const auto& group : vocabulary.groups) {
    auto description = examples::make_options(group.title);
    for (const auto& option : group.options) {
      if (purpose == Purpose::short_help && !option.in_short_help) continue;
      const bool is_switch =
          option.value.empty();  // takes a value, but need not have one; help does not show it
      if (is_switch && (purpose == Purpose::short_help || purpose == Purpose::full_help)) {
        description.add_options()(option.name.c_str(), option.help.c_str());
        continue;
      }
      auto* value = po::value<std::string>()->value_name(option.value);
      if (is_switch) value->implicit_value("true");
      description.add_options()(option.name.c_str(), value, option.help.c_str());
    }
    if (!description.options().empty()) all.add(description);
  }
  if (purpose == Purpose::command_line || purpose == Purpose::full_help) {
    auto common = examples::common_options();
    common.add_options()("list", "the arms and presets with a line each");
    all.add(common);
  }
  return all;
}

// Those of the preset, or those that are compared where the preset has no list of its own.
void choose_arms(const std::vector<ArmHelp>& arms, Settings* settings) {
  if (!settings->arms.empty()) return;
  for (const auto& arm : arms) {
    if (!arm.only_by_name) settings->arms.push_back(arm.name);
  }
}

void print_list(const std::vector<ArmHelp>& arms) {
  std::cout << "Arms:\n";
  for (const auto& arm : arms) std::cout << "  " << arm.name << ": " << arm.help << '\n';
  std::cout << "\nPresets:\n";
  for (const auto& preset : preset_help()) std::cout << "  " << preset.name << ": " << preset.help << '\n';
  std::cout << "\nTrained where --arms names none:\n";
  const auto print = [&](const std::string& what, Settings settings) {
    choose_arms(arms, &settings);
    std::cout << "  " << what << ": " << join(settings.arms) << '\n';
  };
  for (const auto& preset : preset_help()) {
    print("--preset " + preset.name, preset_settings(preset.name, /*quick=*/false, /*fine_tune=*/false));
  }
  print("--quick", preset_settings("tiny", /*quick=*/true, /*fine_tune=*/false));
  print("--fine-tune", preset_settings("tiny", /*quick=*/false, /*fine_tune=*/true));
}

void print_help(const Vocabulary& vocabulary, const std::vector<ArmHelp>& arms, bool everything) {
  std::cout
      << "Trains a small byte-level GPT on real text, once per arm and seed, with the same initial weights\n"
         "and the same batches for every arm. Prints one table and writes a report with curves.\n\n"
         "  convergence --quick                          two minutes on a CPU\n"
         "  convergence --data book.txt --seeds 1,2,3    your text, with standard errors\n"
         "  convergence --preset small --device cuda     GPT-2 small on a GPU\n"
         "  convergence --fine-tune                      LoRA and QLoRA on a second text\n"
         "  convergence --processes 2                    two ranks share every batch; also under torchrun,\n"
         "                                               mpirun or srun, without --processes\n"
      << boost_options(vocabulary, everything ? Purpose::full_help : Purpose::short_help) << '\n';
  if (!everything) {
    std::cout
        << "--help-all: all options; --list: the arms and presets; --print-config: the values of this run\n";
    return;
  }
  print_list(arms);
  std::cout
      << "\nEvery option is also a variable, PACER_LEARNING_RATE for --learning-rate, and a line of an INI\n"
         "file, 'learning-rate = 3e-4'. The command line goes before the environment, that before the file,\n"
         "that before the preset.\n";
}

[[noreturn]] void refuse_unknown(const std::string& what, const std::string& nearest) {
  throw pacer::InvalidArgument(
      "unknown " + what +
      (nearest.empty() ? "; --help lists all options" : "; did you mean " + nearest + "?"));
}

// Takes over one value; an earlier source has precedence, and one source must not give a value twice.
void keep(GivenValues* values, const GivenValues& earlier, const std::string& name, Given given) {
  if (earlier.count(name) != 0) return;
  const bool inserted = values->emplace(name, given).second;
  pacer::require(inserted, "'", name, "' is given twice, the second time as ", given.spelling);
}

GivenValues from_command_line(int argument_count, char** arguments, const Vocabulary& vocabulary) {
  namespace style = po::command_line_style;
  const auto description = boost_options(vocabulary, Purpose::command_line);
  std::vector<std::string> names;
  for (const auto& option : description.options()) names.push_back(option->long_name());
  const auto parsed = po::command_line_parser(argument_count, arguments)
                          .options(description)
                          .style(style::unix_style & ~style::allow_guessing)
                          .allow_unregistered()
                          .run();
  GivenValues values;
  for (const auto& option : parsed.options) {
    const std::string typed = option.original_tokens.empty() ? "" : option.original_tokens.front();
    pacer::require(option.position_key == -1, "unexpected argument '", typed,
                   "' on the command line; options start with two dashes, --help lists them");
    if (option.unregistered) {
      std::string name = typed.substr(0, typed.find('='));
      const std::string nearest =
          examples::nearest_name(name.substr(std::min(name.size(), name.find_first_not_of('-'))), names);
      refuse_unknown("option '" + name + "' on the command line",
                     nearest.empty() ? "" : "'--" + nearest + "'");
    }
    std::string name = option.string_key;
    if (name == "-h") name = "help";
    const std::string text = option.value.empty() ? "true" : option.value.front();
    keep(&values, {}, name, {text, "--" + name + " " + text + " on the command line"});
  }
  return values;
}

void add_environment(GivenValues* values, const Vocabulary& vocabulary) {
  std::map<std::string, std::string> options;  // by variable
  for (const auto& name : vocabulary.names) options[environment_name(name)] = name;
  options["PACER_CONFIG"] = "config";
  const auto parsed = po::parse_environment(po::options_description(), [](const std::string& variable) {
    const auto starts_with = [&](const std::string& prefix) {
      return variable.compare(0, prefix.size(), prefix) == 0;
    };
    const bool foreign = std::any_of(kForeignVariables.begin(), kForeignVariables.end(), starts_with);
    return starts_with("PACER_") && !foreign ? variable : std::string();
  });
  GivenValues found;
  for (const auto& option : parsed.options) {
    const std::string& variable = option.string_key;
    if (options.count(variable) == 0) {
      std::vector<std::string> variables;
      for (const auto& [known, name] : options) variables.push_back(known);
      const std::string nearest = examples::nearest_name(variable, variables);
      refuse_unknown("variable '" + variable + "' in the environment",
                     nearest.empty() ? "" : "'" + nearest + "'");
    }
    const std::string& text = option.value.front();
    if (text.empty()) continue;  // a variable without text counts as not set
    keep(&found, *values, options[variable], {text, variable + "=" + text + " in the environment"});
  }
  values->merge(found);
}

void add_file(GivenValues* values, const std::string& path, const Vocabulary& vocabulary) {
  std::ifstream file(path);
  pacer::require(file.is_open() && file.peek() != std::ifstream::traits_type::eof(),
                 "cannot read the settings file ", path, "; it is missing, empty or not a file");
  GivenValues found;
  try {
    const auto parsed =
        po::parse_config_file(file, boost_options(vocabulary, Purpose::file), /*allow_unregistered=*/true);
    for (const auto& option : parsed.options) {
      const std::string& name = option.string_key;
      if (!vocabulary.knows(name)) {
        // A name inside a [section] arrives as section.name; the file has no sections, so the last part
        // counts.
        const std::string nearest =
            examples::nearest_name(name.substr(name.rfind('.') + 1), vocabulary.names);
        refuse_unknown("setting '" + name + "' in " + path, nearest.empty() ? "" : "'" + nearest + "'");
      }
      const std::string text = option.value.empty() ? "" : option.value.front();
      keep(&found, *values, name, {text, name + " = " + text + " in " + path});
    }
  } catch (const po::error& error) {
    throw pacer::InvalidArgument(path + ": " + error.what());
  }
  values->merge(found);
}

void assign(Settings* settings, const Option& option, const Given& given) {
  try {
    option.assign(*settings, given.text);
  } catch (const pacer::InvalidArgument& error) {
    throw pacer::InvalidArgument(given.spelling + ": " + error.what());
  }
}

}  // namespace

std::optional<Settings> read_settings(int argument_count, char** arguments,
                                      const std::vector<ArmHelp>& arms) {
  const Vocabulary vocabulary(arms);
  GivenValues values;
  try {
    values = from_command_line(argument_count, arguments, vocabulary);
  } catch (const po::error& error) {
    throw pacer::InvalidArgument(std::string(error.what()) + " (on the command line)");
  }
  const auto asked = [&](const char* name) { return values.count(name) != 0; };
  if (asked("help") || asked("help-all")) {
    print_help(vocabulary, arms, asked("help-all"));
    return std::nullopt;
  }
  if (asked("list")) {
    print_list(arms);
    return std::nullopt;
  }
  if (asked("completion")) {
    std::cout << examples::completion_script(values["completion"].text, "convergence",
                                             boost_options(vocabulary, Purpose::command_line));
    return std::nullopt;
  }
  add_environment(&values, vocabulary);
  if (const auto config = values.find("config"); config != values.end()) {
    add_file(&values, std::string(config->second.text), vocabulary);
  }

  // The preset first, then everything that was given lies over it.
  Settings settings;
  const auto apply = [&](bool preset_options) {
    for (const auto& group : vocabulary.groups) {
      for (const auto& option : group.options) {
        const bool chooses_preset =
            option.name == "preset" || option.name == "quick" || option.name == "fine-tune";
        const auto given = values.find(option.name);
        if (given != values.end() && chooses_preset == preset_options)
          assign(&settings, option, given->second);
      }
    }
  };
  apply(/*preset_options=*/true);
  settings = preset_settings(settings.preset, settings.quick, settings.fine_tune);
  apply(/*preset_options=*/false);
  choose_arms(arms, &settings);
  check_settings(settings);
  if (asked("print-config")) {
    std::cout << settings_as_ini(settings);
    return std::nullopt;
  }
  return settings;
}

std::string settings_as_ini(const Settings& settings) {
  std::string text = "# The settings of this run; convergence --config FILE repeats it.\n";
  for (const auto& group : option_groups({})) {
    text += "\n# == " + group.title + "\n\n";
    for (const auto& option : group.options) {
      text += examples::ini_lines(option.name, option.show(settings), option.help);
    }
  }
  return text;
}

}  // namespace convergence
