// The names that pacer gives to folders under the root of the checkpoints; files/checkpoint_folder.h says
// what each of them means. Nothing here looks into a folder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <pacer/files/file_system.h>

namespace pacer {

// A checkpoint, a save under way, the former checkpoint of a step saved again, one that is half removed.
enum class StepFolderKind { checkpoint, partial, replaced, removed };

// What the name of a folder says.
struct StepFolder {
  int64_t step;
  StepFolderKind kind;
};

// The name under which a folder of that kind lies below the root, with the root in front.
std::string step_folder_path(const std::string& root, StepFolder folder);

// What a name under the root means; nothing for a name that pacer would not write, digit for digit.
std::optional<StepFolder> parse_step_folder(const std::string& name);

// All of them under a root, which must exist, by name. FileError where it cannot be listed.
std::vector<StepFolder> step_folders(FileSystem& files, const std::string& root);

// Whether the list has a checkpoint of that step under its own name.
bool has_checkpoint(const std::vector<StepFolder>& folders, int64_t step);

}  // namespace pacer
