#include <pacer/checkpoints/detail/joint_steps.h>

#include <cstdio>
#include <random>
#include <sstream>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr const char* kFirst = "-first";  // what the text of the first joint save of a program ends with

}  // namespace

std::string new_joint_text(bool is_first) {
  std::random_device device;
  char digits[33];
  std::snprintf(digits, sizeof digits, "%08x%08x%08x%08x", device(), device(), device(), device());
  return concatenate(digits, is_first ? kFirst : "");
}

bool is_first_joint_save(const std::string& text) {
  const std::string ending = kFirst;
  return text.size() > ending.size() && text.compare(text.size() - ending.size(), ending.size(), ending) == 0;
}

std::string parse_joint_text(const std::vector<char>& bytes, const std::string& path) {
  std::string text(bytes.begin(), bytes.end());
  const bool is_text = text.find_first_not_of("0123456789abcdefirst-") == std::string::npos;
  require<FileError>(!text.empty() && text.size() <= kMaxJointBytes && is_text, path,
                     " is not what pacer writes; remove that checkpoint");
  return text;
}

std::string text_of(const std::vector<JointStep>& steps) {
  std::string text;
  for (const JointStep& each : steps) {
    text += concatenate(each.step, ' ', each.text.empty() ? "alone" : each.text, '\n');
  }
  return text;
}

std::vector<JointStep> joint_steps_of(const std::string& text) {
  std::vector<JointStep> steps;
  std::istringstream in(text);
  for (JointStep each; in >> each.step >> each.text;) {
    if (each.text == "alone") each.text.clear();
    steps.push_back(each);
  }
  return steps;
}

}  // namespace pacer::detail
