// The name of a program in its messages and its help.
#pragma once

#include <string>

namespace examples {

// The last part of arguments[0].
inline std::string program_name(char** arguments) {
  const std::string path = arguments[0];
  return path.substr(path.rfind('/') + 1);
}

}  // namespace examples
