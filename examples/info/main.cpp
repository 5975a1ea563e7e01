// pacer-info: what pacer, this machine and this launch are. Works without a GPU and with a broken launch
// environment, which it describes. Exit codes: 0 for success, 2 for input that cannot work.
#include <cstdio>
#include <string>

#include <boost/program_options.hpp>

#include <pacer/files/json_lines.h>

#include "facts.h"
#include "parts.h"
#include "support/command_line.h"
#include "support/program.h"

namespace {

std::string as_json(const std::vector<info::Section>& sections) {
  std::string text;
  for (const auto& section : sections) {
    pacer::JsonLine facts;
    for (const auto& [name, value] : section.facts) facts.add(name, value);
    text += (text.empty() ? "{" : ",\n ") + pacer::json_quote(section.title) + ":" + facts.str();
  }
  return text + "}\n";
}

std::string as_text(const std::vector<info::Section>& sections) {
  constexpr size_t kColumns = 24;
  std::string text;
  for (const auto& section : sections) {
    text += (text.empty() ? "" : "\n") + section.title + "\n";
    for (const auto& [name, value] : section.facts) {
      std::string padded = name;
      if (padded.size() < kColumns) padded.resize(kColumns, ' ');
      text += "  " + padded + value + "\n";
    }
  }
  return text;
}

int run(int argument_count, char** arguments) {
  auto known = examples::make_options();
  known.add_options()("json", "print one JSON object of objects")(
      "list", "print the optimizers, hooks and learning-rate schedules with a line each");
  const auto given = examples::read_command_line(
      argument_count, arguments,
      "Says what there is: versions, GPUs, processor, back-ends and how to get those that are missing, what\n"
      "the launcher says, folders. Paste it into bug reports.\n\n"
      "  pacer-info\n"
      "  torchrun --no-python --nproc-per-node 2 pacer-info --json\n",
      known);
  if (!given) return 0;
  const bool json = given->count("json") != 0, list = given->count("list") != 0;
  pacer::require(!json || !list, "--list is a text; leave out --json");
  const std::string text = list   ? info::list_of_parts()
                           : json ? as_json(info::all_facts())
                                  : as_text(info::all_facts());
  std::fputs(text.c_str(), stdout);
  return 0;
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded("pacer-info", [&] { return run(argument_count, arguments); });
}
