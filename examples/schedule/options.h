// The options of pacer-schedule, and the run that they describe.
#pragma once

#include <boost/program_options.hpp>

#include "run.h"
#include "support/command_line.h"

namespace schedule {

boost::program_options::options_description known_options();

// Throws pacer::InvalidArgument for an option that cannot be, or that would do nothing.
Run read_run(const examples::OptionValues& given);

}  // namespace schedule
