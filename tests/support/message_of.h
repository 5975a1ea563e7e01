// What an action throws, as a text.
#pragma once

#include <exception>
#include <string>

namespace pacer::testing {

// The message of the E that `action` throws, empty where it throws nothing. Any other exception escapes.
template <class E = std::exception, class Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

}  // namespace pacer::testing
