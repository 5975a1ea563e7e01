#include <pacer/files/checkpoint_names.h>

#include <algorithm>
#include <charconv>
#include <string_view>

namespace pacer {
namespace {

// At least ten digits, so that names sort like numbers for the first ten billion steps.
std::string step_name(int64_t step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(digits.size() < 10 ? 10 - digits.size() : 0, '0') + digits;
}

std::string step_folder_name(StepFolder folder) {
  const std::string name = step_name(folder.step);
  switch (folder.kind) {
    case StepFolderKind::checkpoint:
      return name;
    case StepFolderKind::partial:
      return '.' + name + ".partial";
    case StepFolderKind::replaced:
      return '.' + name + ".replaced";
    case StepFolderKind::removed:
      break;
  }
  return '.' + name + ".removed";
}

}  // namespace

std::string step_folder_path(const std::string& root, StepFolder folder) {
  return root + '/' + step_folder_name(folder);
}

std::optional<StepFolder> parse_step_folder(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  const size_t digits = name.find(kPrefix) + kPrefix.size();  // checked below, by writing the name again
  if (name.find(kPrefix) > 1 || digits >= name.size()) return std::nullopt;
  int64_t step = 0;
  const auto number = std::from_chars(name.data() + digits, name.data() + name.size(), step);
  if (number.ec != std::errc() || step < 0) return std::nullopt;
  for (const auto kind : {StepFolderKind::checkpoint, StepFolderKind::partial, StepFolderKind::replaced,
                          StepFolderKind::removed}) {
    if (name == step_folder_name({step, kind})) return StepFolder{step, kind};
  }
  return std::nullopt;
}

std::vector<StepFolder> step_folders(FileSystem& files, const std::string& root) {
  std::vector<StepFolder> folders;
  for (const std::string& name : list_folder(files, root + "/.")) {
    if (const auto folder = parse_step_folder(name)) folders.push_back(*folder);
  }
  return folders;
}

bool has_checkpoint(const std::vector<StepFolder>& folders, int64_t step) {
  return std::any_of(folders.begin(), folders.end(), [&](const StepFolder& each) {
    return each.step == step && each.kind == StepFolderKind::checkpoint;
  });
}

}  // namespace pacer
