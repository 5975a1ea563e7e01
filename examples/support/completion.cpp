#include "support/completion.h"

#include <pacer/core/error.h>

#include "support/nearest_name.h"

namespace examples {

namespace po = boost::program_options;

std::string completion_script(const std::string& shell, const std::string& program,
                              const po::options_description& options) {
  pacer::require(shell == "bash" || shell == "zsh", "--completion cannot be '", shown(shell), "'; ",
                 suggestion(shell, {"bash", "zsh"}));
  std::string files = "--", values, names, function = "_pacer_options_of_" + program;
  for (char& c : function) {
    if (c == '-' || c == '.' || c == ' ') c = '_';
  }
  for (const auto& option : options.options()) {
    const std::string name = "--" + option->long_name();
    names += (names.empty() ? "" : " ") + name;
    if (option->semantic()->min_tokens() == 0) continue;  // a switch
    std::string value = option->semantic()->name();       // "cpu|cuda (=cpu)"
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
            function + " " + program.substr(0, program.find(' ')) + "\n";
  return script;
}

}  // namespace examples
