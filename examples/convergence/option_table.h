// The list of options: name, help and how its text becomes a setting. One table serves the command line, the
// environment and the INI file, so the three can never disagree.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "settings.h"

namespace convergence {

struct Option {
  std::string name;   // as on the command line, without the dashes
  std::string value;  // what help calls the value; empty for a switch
  std::string help;
  // Reads the text into the settings; throws pacer::InvalidArgument that says what was expected.
  std::function<void(Settings&, const std::string& text)> assign;
  std::function<std::string(const Settings&)> show;  // the text that assign would read
  bool in_short_help = false;
};

struct OptionGroup {
  std::string title;
  std::vector<Option> options;
};

// `arm_names` are the names that --arms accepts.
std::vector<OptionGroup> option_groups(const std::vector<std::string>& arm_names);

// "PACER_LEARNING_RATE" for "learning-rate".
std::string environment_name(const std::string& option);

}  // namespace convergence
