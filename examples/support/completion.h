// Completion of a program's options in a shell.
#pragma once

#include <string>

#include <boost/program_options/options_description.hpp>

namespace examples {

// The script with which bash (zsh: after bashcompinit) completes the options of `program`, its name or "NAME
// SUBCOMMAND": their names, and the values that an option's value name spells out, "cpu|cuda"; files for FILE
// and FOLDER. Throws pacer::InvalidArgument for another shell.
std::string completion_script(const std::string& shell, const std::string& program,
                              const boost::program_options::options_description& options);

}  // namespace examples
