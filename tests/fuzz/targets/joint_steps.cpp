// saved-together.txt of a checkpoint, by which the checkpoints of several Sessions are found that belong together,
// and the list of them that ranks send each other.
#include <pacer/checkpoints/detail/joint_steps.h>

#include "fuzz/harness.h"

namespace pacer::fuzz {
namespace {

bool are_equal(const std::vector<detail::JointStep>& a, const std::vector<detail::JointStep>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].step != b[i].step || a[i].text != b[i].text) return false;
  }
  return true;
}

void check_file(const std::vector<char>& bytes) {
  std::string text;
  if (!accepts(2 * bytes.size(),
               [&] { text = detail::parse_joint_text(bytes, "step-1/saved-together.txt"); }))
    return;
  demand(std::string(bytes.begin(), bytes.end()) == text, "the text of a file is not what is in it");
  // Between steps that were saved alone, with one that has the same text.
  const std::vector<detail::JointStep> steps{{9, ""}, {7, text}, {5, text}, {0, ""}};
  demand(are_equal(detail::joint_steps_of(detail::text_of(steps)), steps),
         "steps differ after they have travelled between ranks");
}

void check_list(const std::string& text) {
  std::vector<detail::JointStep> steps;
  // A line of four bytes is an entry of forty, in a vector that grows, beside the stream's copy of the text.
  if (!accepts(40 * text.size(), [&] { steps = detail::joint_steps_of(text); })) return;
  demand(are_equal(detail::joint_steps_of(detail::text_of(steps)), steps),
         "a list of steps differs after it was written and read again");
}

}  // namespace

std::vector<std::string> seeds() {
  const std::string first = detail::new_joint_text(true), later = detail::new_joint_text(false);
  demand(detail::is_first_joint_save(first) && !detail::is_first_joint_save(later),
         "which save is the first");
  std::string many;
  for (int i = 0; i < 20000; ++i) many += std::to_string(i) + " a\n";
  return {first, later, "alone", detail::text_of({{1000, later}, {900, ""}, {800, first}}), many};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pacer::fuzz::check_file(pacer::fuzz::bytes_of(data, size));
  pacer::fuzz::check_list(pacer::fuzz::text_of(data, size));
  return 0;
}
