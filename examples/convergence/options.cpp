// What --help, --list and the files of settings show, around the options of the table.
#include "options.h"

#include <algorithm>
#include <array>

#include "arms/arms.h"
#include "option_table.h"
#include "support/command_line.h"

namespace convergence {
namespace {

namespace po = boost::program_options;

constexpr const char* kAbout =
    "Trains a small byte-level GPT on real text, once per arm and seed, with the same initial weights\n"
    "and the same batches for every arm. Prints one table and writes a report with curves.\n\n"
    "  convergence --quick                          two minutes on a CPU\n"
    "  convergence --data book.txt --seeds 1,2,3    your text, with standard errors\n"
    "  convergence --preset small --device cuda     GPT-2 small on a GPU\n"
    "  convergence --fine-tune                      LoRA and QLoRA on a second text\n"
    "  convergence --processes 2                    two ranks share every batch; also under torchrun,\n"
    "                                               mpirun or srun, without --processes\n";

// What most studies need; --help shows these, --help-all every option.
constexpr std::array<const char*, 12> kShortHelp = {"preset",    "quick",  "fine-tune", "arms",
                                                    "seeds",     "tokens", "data",      "learning-rate",
                                                    "processes", "device", "output",    "resume"};

// Beginnings of variables that start like ours but belong to the build, the tests, the benchmarks, or
// support/processes.cpp.
const std::vector<std::string> kForeignVariables = {
    "PACER_BENCH",   "PACER_BUILD",    "PACER_CI",   "PACER_CUDA",     "PACER_DEPS",     "PACER_EXAMPLES",
    "PACER_INSTALL", "PACER_LIBTORCH", "PACER_NVCC", "PACER_PROCESS_", "PACER_SANITIZE", "PACER_TEST",
    "PACER_TORCH",   "PACER_UNITY",    "PACER_VENV", "PACER_WERROR"};

// The first group with the others in it, as help prints them.
po::options_description description(const std::vector<OptionGroup>& groups, bool in_short_help) {
  const auto chosen = [&](const OptionGroup& group) {
    auto options = examples::make_options(group.title);
    for (const auto& option : group.options.options()) {
      const bool often =
          std::find(kShortHelp.begin(), kShortHelp.end(), option->long_name()) != kShortHelp.end();
      if (often || !in_short_help) options.add(option);
    }
    return options;
  };
  auto all = chosen(groups.front());
  for (auto group = groups.begin() + 1; group != groups.end(); ++group) {
    const auto options = chosen(*group);
    if (!options.options().empty()) all.add(options);
  }
  return all;
}

// Those of the preset, or those that are compared where the preset has no list of its own.
void choose_arms(Settings* settings) {
  if (!settings->arms.empty()) return;
  for (const Arm& arm : arms()) {
    if (!arm.only_by_name) settings->arms.push_back(arm.name);
  }
}

std::string list_of_arms() {
  std::string text = "Arms:\n", trained;
  for (const Arm& arm : arms()) text += "  " + arm.name + ": " + arm.help + "\n";
  const auto add = [&](const std::string& what, Settings settings) {
    choose_arms(&settings);
    std::string names;
    for (const auto& name : settings.arms) names += (names.empty() ? "" : ",") + name;
    trained += "  " + what + ": " + names + "\n";
  };
  text += "\nPresets:\n";
  for (const auto& preset : preset_help()) {
    text += "  " + preset.name + ": " + preset.help + "\n";
    add("--preset " + preset.name, preset_settings(preset.name, /*quick=*/false, /*fine_tune=*/false));
  }
  add("--quick", preset_settings("tiny", /*quick=*/true, /*fine_tune=*/false));
  add("--fine-tune", preset_settings("tiny", /*quick=*/false, /*fine_tune=*/true));
  return text + "\nTrained where --arms names none:\n" + trained;
}

}  // namespace

std::optional<Settings> read_settings(int argument_count, char** arguments) {
  std::vector<std::string> arm_names;
  for (const Arm& arm : arms()) arm_names.push_back(arm.name);
  Settings settings = preset_settings("tiny", /*quick=*/false, /*fine_tune=*/false);
  const auto groups = option_groups(&settings, arm_names);
  const auto short_help = description(groups, /*in_short_help=*/true);
  const std::string list = list_of_arms();
  const auto complete = [&] {
    choose_arms(&settings);
    check_settings(settings);
  };

  examples::CommandLineExtras extras;
  extras.in_help = &short_help;
  extras.after_help =
      "--help-all: all options; --list: the arms and presets; --print-config: the values of this run\n";
  extras.after_help_all =
      "\n" + list +
      "\nEvery option is also a variable, PACER_LEARNING_RATE for --learning-rate, and a line of an INI\n"
      "file, 'learning-rate = 3e-4'. The command line goes before the environment, that before the file,\n"
      "that before the preset.\n";
  extras.texts = {{"list", "the arms and presets with a line each", list}};
  extras.variables = "PACER_";
  extras.foreign_variables = kForeignVariables;
  extras.config = [&] {
    complete();
    return settings_as_ini(settings);
  };
  const auto known = description(groups, /*in_short_help=*/false);
  if (!examples::read_command_line(argument_count, arguments, kAbout, known, nullptr, extras)) {
    return std::nullopt;
  }
  complete();
  return settings;
}

std::string settings_as_ini(const Settings& settings) {
  std::string text = "# The settings of this run; convergence --config FILE repeats it.\n";
  Settings copy = settings;
  for (const auto& group : option_groups(&copy)) {
    text += "\n# == " + group.title + "\n\n";
    for (const auto& option : group.options.options()) {
      text +=
          examples::ini_lines(option->long_name(), examples::default_text(*option), option->description());
    }
  }
  return text;
}

}  // namespace convergence
