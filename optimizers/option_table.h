// The options of an optimizer in words, from the table that also saves, checks and compares them: for help
// texts of programs that offer them, and for the tables in docs/.
#pragma once

#include <string>
#include <vector>

namespace pacer {

// One option of an optimizer, in words.
struct OptionDescription {
  std::string name;           // as the setter's
  std::string type;           // in C++
  std::string meaning;        // a sentence without its full stop
  std::string default_value;  // "unset" where there is none
};

// In the order in which options are listed. For FusedAdamOptions, FusedAdamWOptions, FusedLambOptions,
// OneBitAdamOptions and OneBitLambOptions.
template <class Options>
std::vector<OptionDescription> describe_options();

// The meaning of one option. Throws InvalidArgument where there is none of that name.
std::string option_help(const std::vector<OptionDescription>& options, const std::string& name);
template <class Options>
std::string option_help(const std::string& name) {
  return option_help(describe_options<Options>(), name);
}

// A Markdown table of type, name, meaning and default.
std::string markdown_table(const std::vector<OptionDescription>& options);

}  // namespace pacer
