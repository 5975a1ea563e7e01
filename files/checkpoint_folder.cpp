#include <pacer/files/checkpoint_folder.h>

#include <algorithm>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/checkpoint_names.h>

namespace pacer {
namespace {

void check_size(const FileReader& reader, const CheckpointFile& file, const std::string& path) {
  require<FileError>(reader.size() == file.size, path, " has ", reader.size(),
                     " bytes and the manifest says ", file.size, ": it is damaged or of another checkpoint");
}

void check_checksum(const std::string& checksum, const CheckpointFile& file, const std::string& path) {
  require<FileError>(checksum == file.checksum, path, " has the XXH3-128 checksum ", checksum,
                     " and the manifest says ", file.checksum, ": it is damaged or of another checkpoint");
}

// A folder that was renamed or copied holds another step than its name says.
void check_step(const CheckpointManifest& manifest, const CheckpointInfo& checkpoint) {
  require<FileError>(manifest.step == checkpoint.step, checkpoint.folder, "/", kManifestName, " is of step ",
                     manifest.step, " and the folder's name is that of step ", checkpoint.step,
                     ": give the folder the name that it was saved with, or remove it");
}

// The manifest of a checkpoint whose files have their sizes.
std::optional<CheckpointManifest> manifest_if_whole(FileSystem& files, const CheckpointInfo& checkpoint) {
  try {
    CheckpointManifest manifest = read_manifest(checkpoint.folder, files);
    check_step(manifest, checkpoint);
    for (const CheckpointFile& file : manifest.files) {
      const std::string path = checkpoint.folder + '/' + file.name;
      check_size(FileReader(files, path), file, path);
    }
    return manifest;
  } catch (const FileError&) {
    return std::nullopt;
  }
}

}  // namespace

CheckpointManifest read_manifest(const std::string& folder, FileSystem& files) {
  const std::string path = folder + '/' + kManifestName;
  FileReader reader(files, path);
  require<FileError>(reader.size() <= kMaxManifestBytes, path, " has ", reader.size(),
                     " bytes; a manifest has at most ", kMaxManifestBytes);
  return parse_manifest(reader.read(), path);
}

void read_checkpoint_file(const std::string& folder, const CheckpointFile& file,
                          const std::function<void(FileReader&)>& consume, FileSystem& files) {
  const std::string path = folder + '/' + file.name;
  FileReader reader(files, path);
  check_size(reader, file, path);
  consume(reader);
  check_checksum(reader.finish(), file, path);
}

std::vector<CheckpointInfo> list_checkpoints(const std::string& root, FileSystem& files) {
  if (!folder_exists(files, root)) return {};
  const std::vector<StepFolder> folders = step_folders(files, root);
  std::vector<CheckpointInfo> checkpoints;
  for (const auto& [step, kind] : folders) {
    if (kind == StepFolderKind::checkpoint)
      checkpoints.push_back({step, step_folder_path(root, {step, StepFolderKind::checkpoint})});
    if (kind == StepFolderKind::replaced && !has_checkpoint(folders, step)) {
      checkpoints.push_back({step, step_folder_path(root, {step, StepFolderKind::replaced})});
    }
  }
  std::sort(checkpoints.begin(), checkpoints.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step > b.step; });
  return checkpoints;
}

CheckpointManifest verify_checkpoint(const std::string& folder, FileSystem& files) {
  CheckpointManifest manifest = read_manifest(folder, files);
  for (const CheckpointFile& file : manifest.files) {
    const std::string path = folder + '/' + file.name;
    FileReader reader(files, path);
    check_size(reader, file, path);
    check_checksum(reader.checksum(), file, path);
  }
  return manifest;
}

CheckpointManifest verify_checkpoint(const CheckpointInfo& checkpoint, FileSystem& files) {
  CheckpointManifest manifest = verify_checkpoint(checkpoint.folder, files);
  check_step(manifest, checkpoint);
  return manifest;
}

std::string passed_over(const CheckpointInfo& checkpoint, const FileError& why) {
  return "passed over the checkpoint " + checkpoint.folder + ": " + why.what();
}

Checkpoint open_checkpoint(const std::string& folder, FileSystem& files) {
  std::vector<std::string> names;
  for (const CheckpointFile& file : read_manifest(folder, files).files) names.push_back(file.name);
  return open_checkpoint(folder, names, files);
}

Checkpoint open_checkpoint(const std::string& folder, const std::vector<std::string>& names,
                           FileSystem& files) {
  Checkpoint checkpoint;
  checkpoint.manifest = read_manifest(folder, files);
  for (const CheckpointFile& file : checkpoint.manifest.files) {
    if (std::find(names.begin(), names.end(), file.name) == names.end()) continue;
    const std::string path = folder + '/' + file.name;
    FileReader reader(files, path);
    check_size(reader, file, path);
    std::vector<char> bytes = reader.read();
    check_checksum(checksum_of({bytes.data(), bytes.size()}), file, path);
    checkpoint.files.emplace(file.name, std::move(bytes));
  }
  return checkpoint;
}

NewestCheckpoint find_newest_checkpoint(const std::string& root, FileSystem& files) {
  NewestCheckpoint newest;
  std::optional<CheckpointInfo> not_finite;  // the newest of these
  size_t reason_of_it = 0;
  for (CheckpointInfo& each : list_checkpoints(root, files)) {
    try {
      const CheckpointManifest manifest = verify_checkpoint(each, files);
      if (!manifest.is_finite && !not_finite) {
        not_finite = each;
        reason_of_it = newest.passed_over.size();
      }
      require<FileError>(manifest.is_finite, "its parameters are not finite");
      newest.checkpoint = std::move(each);
      break;
    } catch (const FileError& error) {
      newest.passed_over.push_back(passed_over(each, error));
    }
  }
  if (!newest.checkpoint && not_finite) {
    newest.passed_over[reason_of_it] = "took the checkpoint " + not_finite->folder +
                                       " though its parameters are not finite, because none has finite ones";
    newest.checkpoint = std::move(not_finite);
  }
  return newest;
}

std::vector<RemovalFailure> remove_old_checkpoints(const std::string& root, int64_t keep, FileSystem& files,
                                                   int64_t newest_step, std::optional<int64_t> stays) {
  require(keep >= 1, "cannot keep ", keep, " checkpoints; keep 1 or more");
  if (!folder_exists(files, root)) return {};
  std::vector<RemovalFailure> failures;
  const auto attempt = [&](int64_t step, const auto& action) {
    try {
      action();
    } catch (const FileError& error) {
      failures.push_back({step, error.what()});
    }
  };
  for (const auto& [step, kind] : step_folders(files, root)) {
    if (kind != StepFolderKind::removed) continue;
    attempt(step, [&, step = step] {
      remove_folder(files, step_folder_path(root, {step, StepFolderKind::removed}));
    });
  }
  int64_t kept = 0;
  bool has_finite = false;
  for (const CheckpointInfo& each : list_checkpoints(root, files)) {
    if (each.step > newest_step) continue;
    const std::optional<CheckpointManifest> manifest = manifest_if_whole(files, each);
    if (!manifest) continue;
    const bool is_newest_finite = manifest->is_finite && !std::exchange(has_finite, true);
    if (++kept <= keep || is_newest_finite || each.step == stays) continue;
    attempt(each.step, [&] {
      // Out of sight first, so that what is half removed is no checkpoint.
      const std::string removed = step_folder_path(root, {each.step, StepFolderKind::removed});
      rename(files, each.folder, removed);
      remove_folder(files, removed);
    });
  }
  return failures;
}

}  // namespace pacer
