#include "support/command_line.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include <pacer/files/json_writer.h>
#include <pacer/files/number_text.h>

#include "support/completion.h"
#include "support/program_name.h"

namespace examples {

namespace po = boost::program_options;

namespace {

// Whether the option needs no value.
bool is_switch(const po::option_description& option) { return option.semantic()->min_tokens() == 0; }

std::vector<std::string> names_of(const po::options_description& options, const std::string& dashes) {
  std::vector<std::string> names;
  for (const auto& option : options.options()) names.push_back(dashes + option->long_name());
  return names;
}

// The text that reads back to the same value.
std::string show(const boost::any& value) {
  if (const auto* text = boost::any_cast<std::string>(&value)) return *text;
  if (const auto* number = boost::any_cast<int64_t>(&value)) return std::to_string(*number);
  if (const auto* number = boost::any_cast<int>(&value)) return std::to_string(*number);
  if (const auto* yes = boost::any_cast<bool>(&value)) return *yes ? "true" : "false";
  return pacer::exact_text(boost::any_cast<double>(value));
}

std::string config_of(const std::string& program, const OptionValues& given,
                      const po::options_description& known) {
  std::string text = "# The options of a run; " + program + " --config FILE repeats it.\n";
  for (const auto& option : known.options()) {
    const auto& value = given[option->long_name()];
    const bool plain_switch = !value.empty() && is_switch(*option) && value.value().type() != typeid(bool);
    text += "\n" + ini_lines(option->long_name(),
                             value.empty()  ? ""
                             : plain_switch ? "true"
                                            : show(value.value()),
                             option->description());
  }
  return text;
}

// Of a file of options, which is small: it is read as a whole, also from a pipe.
std::string content_of(const std::string& path) {
  constexpr size_t kLargest = 1 << 20;  // bytes
  std::ifstream file(path, std::ios::binary);
  std::string text;
  for (std::array<char, 4096> piece; file && text.size() <= kLargest;) {
    file.read(piece.data(), piece.size());
    text.append(piece.data(), static_cast<size_t>(file.gcount()));
  }
  pacer::require(!text.empty(), "cannot read the file ", path,
                 " of --config; it is missing, empty or not a file");
  pacer::require(text.size() <= kLargest, path, " of --config is no file of options: it has more than ",
                 kLargest, " bytes");
  return text;
}

// Puts one character for another in the words that an error of Boost is about.
void replace_in_words(po::error& error, char from, char to) {
  struct Words : po::error_with_option_name {
    static std::map<std::string, std::string>& of(po::error_with_option_name& error) {
      return error.*&Words::m_substitutions;
    }
  };
  auto* const named = dynamic_cast<po::error_with_option_name*>(&error);
  if (named == nullptr) return;
  for (auto& word : Words::of(*named)) std::replace(word.second.begin(), word.second.end(), from, to);
}

// Boost's sentence, with no more of the words at fault than a message may show. Boost fills them in until no
// placeholder is left, which never ends where the words themselves hold one, such as "%value%": so it does
// not get to see their percent signs.
std::string sentence_of(po::error& error) {
  constexpr size_t kLongest = 300;
  constexpr char kPercent = '\x01';
  replace_in_words(error, '%', kPercent);
  std::string words = error.what();
  std::replace(words.begin(), words.end(), kPercent, '%');
  const std::string text = pacer::json_quote(words.substr(0, kLongest));
  return text.substr(1, text.size() - 2) + (words.size() > kLongest ? "..." : "");
}

// How each value that was given was written, by the name of its option, for errors.
using Spellings = std::map<std::string, std::string>;

// The end of a sentence about a name that no option has; a long list of names would hide what it says.
std::string advice(const std::string& typed, const std::vector<std::string>& names) {
  constexpr size_t kMostNames = 30;
  const bool lists = names.size() <= kMostNames || !nearest_name(typed, names).empty();
  return lists ? suggestion(typed, names) : "--help-all lists all options";
}

// Lies below what was typed. A variable without text counts as not set.
void store_variables(const CommandLineExtras& extras, const po::options_description& all,
                     const po::options_description& known, OptionValues* given, Spellings* spellings) {
  auto names = names_of(known, ""), variables = names_of(known, extras.variables);
  names.push_back("config");
  variables.push_back(extras.variables + "config");
  for (std::string& variable : variables) {
    for (char& c : variable) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
  }
  const auto option_of = [&](const std::string& variable) -> std::string {
    const auto begins = [&](const std::string& beginning) { return variable.rfind(beginning, 0) == 0; };
    const auto& foreign = extras.foreign_variables;
    if (!begins(extras.variables) || std::any_of(foreign.begin(), foreign.end(), begins)) return {};
    const auto found = std::find(variables.begin(), variables.end(), variable);
    pacer::require(found != variables.end(), "unknown variable '", shown(variable), "' in the environment; ",
                   advice(variable, variables));
    const std::string text = std::getenv(variable.c_str());
    const std::string name = text.empty() ? "" : names[static_cast<size_t>(found - variables.begin())];
    spellings->emplace(name, variable + "=" + shown(text) + " in the environment");
    return name;
  };
  try {
    po::store(po::parse_environment(all, option_of), *given);
  } catch (po::error& error) {
    throw pacer::InvalidArgument("in the environment: " + sentence_of(error));
  }
}

// Lies below what was typed and the environment.
void store_file(const std::string& path, const po::options_description& known, OptionValues* given,
                Spellings* spellings) {
  std::istringstream file(content_of(path));
  try {
    auto parsed = po::parse_config_file(file, known, /*allow_unregistered=*/true);
    po::parsed_options taken(&known);
    for (const auto& option : parsed.options) {
      const std::string& name = option.string_key;
      const auto* found = known.find_nothrow(name, /*approx=*/false);
      pacer::require(found != nullptr, "unknown option '", shown(name), "' in ", path, "; ",
                     advice(name.substr(name.rfind('.') + 1), names_of(known, "")));
      const std::string value = option.value.empty() ? "" : option.value.front();
      if (found->semantic()->max_tokens() == 0) {
        pacer::require(value == "true" || value == "false", name, " = ", shown(value), " in ", path,
                       ": expected true or false");
        if (value == "false") continue;
      }
      spellings->emplace(name, name + " = " + shown(value) + " in " + path);
      taken.options.push_back(option);
    }
    po::store(taken, *given);
  } catch (po::error& error) {
    throw pacer::InvalidArgument(path + ": " + sentence_of(error));
  }
}

void notify(const po::options_description& known, const OptionValues& given, const Spellings& spellings) {
  for (const auto& option : known.options()) {
    const auto& value = given[option->long_name()];
    if (value.empty() || value.defaulted()) continue;
    try {
      option->semantic()->notify(value.value());
    } catch (const pacer::InvalidArgument& error) {
      throw pacer::InvalidArgument(spellings.at(option->long_name()) + ": " + error.what());
    }
  }
}

class Switch : public po::typed_value<bool> {
 public:
  explicit Switch(bool* variable) : typed_value(variable) { implicit_value(true, ""); }
  std::string name() const override { return {}; }
};

}  // namespace

po::typed_value<bool>* make_switch(bool* variable) { return new Switch(variable); }

po::options_description make_options(const std::string& title) {
  constexpr unsigned kColumns = 104, kHelpColumns = 72;
  return po::options_description(title, kColumns, kHelpColumns);
}

po::options_description common_options() {
  auto options = make_options("All programs");
  const auto word = [](const char* name) { return po::value<std::string>()->value_name(name); };
  options.add_options()                                                         //
      ("help,h", "what the program does, and the options that most runs need")  //
      ("help-all", "all options")                                               //
      ("config", word("FILE"),
       "an INI file with any of the other options, one 'name = value' per line; the command line goes "
       "first")                                                                                   //
      ("print-config", "write such a file, with every option and its value, to stdout, and end")  //
      ("completion", word("bash|zsh"),
       "write a script to stdout with which the shell completes options, and end");
  return options;
}

std::optional<OptionValues> read_command_line(int argument_count, char** arguments, const std::string& about,
                                              const po::options_description& known,
                                              const char* without_dashes, const CommandLineExtras& extras) {
  namespace style = po::command_line_style;
  OptionValues given;
  Spellings spellings;
  po::positional_options_description plain;
  for (const auto& name : split(without_dashes == nullptr ? "" : without_dashes)) plain.add(name.c_str(), 1);
  auto common = common_options();
  for (const auto& text : extras.texts) common.add_options()(text.name.c_str(), text.help.c_str());
  auto all = make_options({});
  all.add(known).add(common);
  try {
    const auto parsed = po::command_line_parser(argument_count, arguments)
                            .options(all)
                            .positional(plain)
                            .style(style::unix_style & ~style::allow_guessing)
                            .run();
    for (const auto& option : parsed.options) {
      const std::string value = option.value.empty() ? "" : " " + shown(option.value.front());
      spellings.emplace(option.string_key, "--" + option.string_key + value + " on the command line");
    }
    po::store(parsed, given);
  } catch (const po::unknown_option& error) {
    const std::string typed = error.get_option_name();
    throw pacer::InvalidArgument("unknown option '" + shown(typed) + "'; " +
                                 advice(typed, names_of(all, "--")));
  } catch (const po::too_many_positional_options_error&) {
    throw pacer::InvalidArgument(
        "there is an argument too many; options start with two dashes, --help lists them");
  } catch (po::error& error) {
    throw pacer::InvalidArgument(sentence_of(error) + "; --help lists the options");
  }
  const std::string program = program_name(arguments);
  const auto asked = [&](const std::string& name) { return given.count(name) != 0; };
  const auto text = std::find_if(extras.texts.begin(), extras.texts.end(),
                                 [&](const auto& candidate) { return asked(candidate.name); });
  if (asked("help-all")) {
    std::cout << about << all << extras.after_help_all << std::flush;
  } else if (asked("help")) {
    std::cout << about << '\n'
              << (extras.in_help != nullptr ? *extras.in_help : known) << '\n'
              << (extras.after_help.empty() ? "--help-all: these and the options of all programs\n"
                                            : extras.after_help)
              << std::flush;
  } else if (text != extras.texts.end()) {
    std::cout << text->text << std::flush;
  } else if (asked("completion")) {
    std::cout << completion_script(given["completion"].as<std::string>(), program, all) << std::flush;
  } else {
    if (!extras.variables.empty()) store_variables(extras, all, known, &given, &spellings);
    if (asked("config")) store_file(given["config"].as<std::string>(), known, &given, &spellings);
    notify(known, given, spellings);
    if (!asked("print-config")) return given;
    std::cout << (extras.config ? extras.config() : config_of(program, given, known)) << std::flush;
  }
  return std::nullopt;
}

std::string default_text(const po::option_description& option) {
  boost::any value;
  return option.semantic()->apply_default(value) ? show(value) : std::string();
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> items;
  std::istringstream text(list);
  for (std::string item; std::getline(text, item, ',');) items.push_back(item);
  return items;
}

std::string ini_lines(const std::string& name, const std::string& value, const std::string& meaning) {
  pacer::require(value.find_first_of("#\n") == std::string::npos, "--", name, " ", shown(value),
                 " cannot stand in an INI file, where # begins a comment; choose another name for it");
  return "# " + meaning + "\n" + (value.empty() ? "# " : "") + name + " = " + value + "\n";
}

}  // namespace examples
