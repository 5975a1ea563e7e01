// The study's options, one entry each: name, value, range and help, bound to the settings. The command line,
// the environment, INI files and the settings.ini of a run are all made from it.
#pragma once

#include <string>
#include <vector>

#include <boost/program_options.hpp>

#include "settings.h"

namespace convergence {

struct OptionGroup {
  std::string title;
  boost::program_options::options_description options;
};

// Options that write to `*settings` and have what it holds as their defaults. The first three start from a
// preset's settings, and all others lie over these. `arm_names` are the names that --arms accepts.
std::vector<OptionGroup> option_groups(Settings* settings, const std::vector<std::string>& arm_names = {});

}  // namespace convergence
