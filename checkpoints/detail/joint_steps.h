// What checkpoints that were saved together have in common (joint_saves.h), as texts: in a file of each, and between
// ranks. Knows no LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pacer::detail {

// The file of a checkpoint that was saved with those of other Sessions: what is the same in all of them.
constexpr const char* kJointFile = "saved-together.txt";
// A file of more bytes is none of pacer's.
constexpr int64_t kMaxJointBytes = 64;

// A text that no other joint save has: two attempts at one step may differ in what they hold. `is_first`: the
// program has saved nothing together before.
std::string new_joint_text(bool is_first);
// True where it was made so.
bool is_first_joint_save(const std::string& text);
// The text in such a file. Throws FileError where it is not what pacer writes.
std::string parse_joint_text(const std::vector<char>& bytes, const std::string& path);

// A checkpoint on the disk. The text is empty where a Session saved it alone.
struct JointStep {
  int64_t step = 0;
  std::string text;
};

// The same to and from a text that travels between ranks.
std::string text_of(const std::vector<JointStep>& steps);
std::vector<JointStep> joint_steps_of(const std::string& text);

}  // namespace pacer::detail
