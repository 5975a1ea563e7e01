// Mistakes as users make them, and what they hear: one sentence with what, where and what to do, never
// silence, never a back trace.
#pragma once

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "support/captured_stderr.h"

namespace pacer::testing {

struct Mistake {
  std::string name;
  std::vector<std::string> says;  // parts of the sentence, thrown or warned
  std::function<void()> make;
};

// What is wrong with a message: "" where it has all the parts and can be read.
inline std::string fault_of(const std::string& message, const std::vector<std::string>& says) {
  if (message.empty()) return "<passes in silence>";
  if (message.find("Exception raised from") != std::string::npos ||
      message.find("frame #") != std::string::npos) {
    return "<a back trace> " + message.substr(0, message.find('\n'));
  }
  for (const std::string& part : says) {
    if (message.find(part) == std::string::npos) return "<no '" + part + "' in> " + message;
  }
  return "";
}

// What a rank or program hears of an action: what it throws, else what it writes to stderr.
inline std::string heard_of(const std::function<void()>& action) {
  const CapturedStderr output;
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return output.text();
}

// The faults of all of them, a line each.
inline std::string faults_of(const std::vector<Mistake>& mistakes) {
  std::string faults;
  for (const Mistake& mistake : mistakes) {
    const std::string fault = fault_of(heard_of(mistake.make), mistake.says);
    if (!fault.empty()) faults += mistake.name + ": " + fault + "\n";
  }
  return faults;
}

}  // namespace pacer::testing
