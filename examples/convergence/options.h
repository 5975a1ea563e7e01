// How settings reach the program: command line, then environment (PACER_*), then an INI file, then the
// preset (support/command_line.h). The options are in option_table.h, what the settings mean in settings.h.
#pragma once

#include <optional>
#include <string>

#include "settings.h"

namespace convergence {

// The settings for this run, or nothing where help, a list or the settings were asked for and printed.
// Everything that cannot be understood throws pacer::InvalidArgument with one sentence that names the option,
// its value and where it came from.
std::optional<Settings> read_settings(int argument_count, char** arguments);

// The settings as an INI file that --config reads back.
std::string settings_as_ini(const Settings& settings);

}  // namespace convergence
