#include "support/command_line.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include <pacer/files/json_lines.h>

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
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), boost::any_cast<double>(value)).ptr;
  return std::string(text.data(), end);
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

// Lies below what was typed.
void store_file(const std::string& path, const po::options_description& known, OptionValues* given) {
  std::istringstream file(content_of(path));
  try {
    auto parsed = po::parse_config_file(file, known, /*allow_unregistered=*/true);
    po::parsed_options taken(&known);
    for (const auto& option : parsed.options) {
      const std::string& name = option.string_key;
      const auto* found = known.find_nothrow(name, /*approx=*/false);
      pacer::require(found != nullptr, "unknown option '", shown(name), "' in ", path, "; ",
                     suggestion(name.substr(name.rfind('.') + 1), names_of(known, "")));
      if (is_switch(*found)) {
        const std::string value = option.value.empty() ? "" : option.value.front();
        pacer::require(value == "true" || value == "false", name, " = ", shown(value), " in ", path,
                       ": expected true or false");
        if (value == "false") continue;
      }
      taken.options.push_back(option);
    }
    po::store(taken, *given);
  } catch (po::error& error) {
    throw pacer::InvalidArgument(path + ": " + sentence_of(error));
  }
}

}  // namespace

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
                                              const char* without_dashes) {
  namespace style = po::command_line_style;
  OptionValues given;
  po::positional_options_description plain;
  if (without_dashes != nullptr) plain.add(without_dashes, 1);
  const auto common = common_options();
  auto all = make_options({});
  all.add(known).add(common);
  try {
    const auto parsed = po::command_line_parser(argument_count, arguments)
                            .options(all)
                            .positional(plain)
                            .style(style::unix_style & ~style::allow_guessing)
                            .run();
    po::store(parsed, given);
  } catch (const po::unknown_option& error) {
    const std::string typed = error.get_option_name();
    throw pacer::InvalidArgument("unknown option '" + shown(typed) + "'; " +
                                 suggestion(typed, names_of(all, "--")));
  } catch (const po::too_many_positional_options_error&) {
    throw pacer::InvalidArgument(
        "there is an argument too many; options start with two dashes, --help lists them");
  } catch (po::error& error) {
    throw pacer::InvalidArgument(sentence_of(error) + "; --help lists the options");
  }
  const std::string program = program_name(arguments);
  if (given.count("help-all") != 0) {
    std::cout << about << all << std::flush;
  } else if (given.count("help") != 0) {
    std::cout << about << '\n'
              << known << "\n--help-all: these and the options of all programs\n"
              << std::flush;
  } else if (given.count("completion") != 0) {
    std::cout << completion_script(given["completion"].as<std::string>(), program, all) << std::flush;
  } else {
    if (given.count("config") != 0) store_file(given["config"].as<std::string>(), known, &given);
    if (given.count("print-config") == 0) return given;
    std::cout << config_of(program, given, known) << std::flush;
  }
  return std::nullopt;
}

std::string ini_lines(const std::string& name, const std::string& value, const std::string& meaning) {
  pacer::require(value.find_first_of("#\n") == std::string::npos, "--", name, " ", shown(value),
                 " cannot stand in an INI file, where # begins a comment; choose another name for it");
  return "# " + meaning + "\n" + (value.empty() ? "# " : "") + name + " = " + value + "\n";
}

std::string completion_script(const std::string& shell, const std::string& program,
                              const po::options_description& options) {
  pacer::require(shell == "bash" || shell == "zsh", "--completion cannot be '", shown(shell), "'; ",
                 suggestion(shell, {"bash", "zsh"}));
  std::string files = "--", values, names, function = "_pacer_options_of_" + program;
  for (char& c : function) {
    if (c == '-' || c == '.') c = '_';
  }
  for (const auto& option : options.options()) {
    const std::string name = "--" + option->long_name();
    names += (names.empty() ? "" : " ") + name;
    if (is_switch(*option)) continue;
    std::string value = option->semantic()->name();  // "cpu|cuda (=cpu)"
    value = value.substr(0, value.find_first_of(" [("));
    if (value == "FILE" || value == "FOLDER" || value == "FILE|FOLDER") {
      files += "|" + name;
      continue;
    }
    // Other values without a bar are numbers and lists, for which nothing is proposed.
    if (value.find('|') == std::string::npos) value.clear();
    for (char& c : value) {
      if (c == '|') c = ' ';
    }
    values += "    " + name + ") words='" + value + "' ;;\n";
  }
  std::string script = shell == "zsh" ? "autoload -U +X compinit && compinit\n"
                                        "autoload -U +X bashcompinit && bashcompinit\n"
                                      : "";
  // bash takes the = of --name=value for a word of its own.
  script += function +
            "() {\n  local word=$2 before=$3 words IFS=$' \\t\\n'\n"
            "  [[ $word == '=' ]] && word=''\n"
            "  [[ $before == '=' ]] && before=${COMP_WORDS[COMP_CWORD-2]}\n"
            "  case $before in\n    " +
            files +
            ")\n"
            "      IFS=$'\\n'\n      COMPREPLY=($(compgen -f -- \"$word\"))\n      return ;;\n" +
            values + "    *) words='" + names +
            "' ;;\n  esac\n"
            "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}\n"
            "complete -o filenames -F " +
            function + " " + program + "\n";
  return script;
}

}  // namespace examples
