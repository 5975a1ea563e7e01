#include <pacer/core/checkpoint_folder.h>

#include <algorithm>
#include <charconv>

#include <pacer/core/error.h>

namespace pacer {
namespace {

// At least ten digits, so that names sort like numbers for the first ten billion steps.
std::string step_name(int64_t step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(digits.size() < 10 ? 10 - digits.size() : 0, '0') + digits;
}
std::string checkpoint_path(const std::string& root, int64_t step) { return root + '/' + step_name(step); }
std::string hidden_path(const std::string& root, int64_t step, const char* ending) {
  return root + "/." + step_name(step) + ending;
}

enum class FolderKind { checkpoint, partial, replaced, removed };
struct StepFolder {
  int64_t step;
  FolderKind kind;
};
constexpr const char* kPartial = ".partial";
constexpr const char* kReplaced = ".replaced";
constexpr const char* kRemoved = ".removed";

// What a name under the root means; nothing for a name that pacer would not write, digit for digit.
std::optional<StepFolder> parse_folder_name(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  const size_t digits = name.find(kPrefix) + kPrefix.size();  // checked below, by writing the name again
  if (name.find(kPrefix) > 1 || digits >= name.size()) return std::nullopt;
  int64_t step = 0;
  const auto number = std::from_chars(name.data() + digits, name.data() + name.size(), step);
  if (number.ec != std::errc() || step < 0) return std::nullopt;
  const std::string plain = step_name(step);
  if (name == plain) return StepFolder{step, FolderKind::checkpoint};
  if (name == '.' + plain + kPartial) return StepFolder{step, FolderKind::partial};
  if (name == '.' + plain + kReplaced) return StepFolder{step, FolderKind::replaced};
  if (name == '.' + plain + kRemoved) return StepFolder{step, FolderKind::removed};
  return std::nullopt;
}

std::vector<StepFolder> step_folders(FileSystem& files, const std::string& root) {
  std::vector<StepFolder> folders;
  for (const std::string& name : list_folder(files, root + "/.")) {
    if (const auto folder = parse_folder_name(name)) folders.push_back(*folder);
  }
  return folders;
}

bool has_checkpoint(const std::vector<StepFolder>& folders, int64_t step) {
  return std::any_of(folders.begin(), folders.end(), [&](const StepFolder& each) {
    return each.step == step && each.kind == FolderKind::checkpoint;
  });
}

// What dead saves left. Whatever cannot be removed now is tried again by the next commit: it does no harm,
// and the checkpoint that was just saved is good.
void remove_leftovers(FileSystem& files, const std::string& root) noexcept {
  const auto tolerant = [](const auto& action) {
    try {
      action();
    } catch (const std::exception&) {
    }
  };
  tolerant([&] {
    const std::vector<StepFolder> folders = step_folders(files, root);
    for (const auto& [step, kind] : folders) {
      tolerant([&, step = step, kind = kind] {
        if (kind == FolderKind::partial) remove_folder(files, hidden_path(root, step, kPartial));
        if (kind == FolderKind::removed) remove_folder(files, hidden_path(root, step, kRemoved));
        if (kind != FolderKind::replaced) return;
        const std::string replaced = hidden_path(root, step, kReplaced);
        if (has_checkpoint(folders, step)) {
          remove_folder(files, replaced);
        } else {
          rename(files, replaced, checkpoint_path(root, step));
        }
      });
    }
  });
}

CheckpointManifest read_manifest(FileSystem& files, const std::string& folder) {
  const std::string path = folder + '/' + kManifestName;
  FileReader reader(files, path);
  require<FileError>(reader.size() <= kMaxManifestBytes, path, " has ", reader.size(),
                     " bytes; a manifest has at most ", kMaxManifestBytes);
  return parse_manifest(reader.read(), path);
}

void check_size(const FileReader& reader, const CheckpointFile& file, const std::string& path) {
  require<FileError>(reader.size() == file.size, path, " has ", reader.size(),
                     " bytes and the manifest says ", file.size, ": it is damaged or of another checkpoint");
}

void check_checksum(const std::string& checksum, const CheckpointFile& file, const std::string& path) {
  require<FileError>(checksum == file.checksum, path, " has the XXH3-128 checksum ", checksum,
                     " and the manifest says ", file.checksum, ": it is damaged or of another checkpoint");
}

bool has_all_sizes(FileSystem& files, const std::string& folder) {
  try {
    for (const CheckpointFile& file : read_manifest(files, folder).files) {
      const std::string path = folder + '/' + file.name;
      check_size(FileReader(files, path), file, path);
    }
    return true;
  } catch (const FileError&) {
    return false;
  }
}

}  // namespace

CheckpointWriter::CheckpointWriter(FileSystem& files, std::string root, int64_t step)
    : files_(files), root_(std::move(root)), staging_(hidden_path(root_, step, kPartial)) {
  require(step >= 0, "cannot save a checkpoint of step ", step, "; steps start at 0");
  manifest_.step = step;
  if (make_folder(files_, root_)) sync_folder(files_, root_ + "/..");
  if (make_folder(files_, staging_)) return;
  remove_folder(files_, staging_);  // of a dead save
  require<FileError>(make_folder(files_, staging_), "cannot make the folder ", staging_,
                     ": another process saves the same step under this root");
}

CheckpointWriter::~CheckpointWriter() {
  if (state_ == State::committed) return;
  try {
    remove_folder(files_, staging_);
  } catch (const std::exception&) {
    // The next commit removes it.
  }
}

CheckpointFile write_checkpoint_file(const std::string& folder, const std::string& name,
                                     const std::function<void(ByteSink&)>& produce, FileSystem& files) {
  FileWriter out(files, folder + '/' + name);
  produce(out);
  out.finish();
  return {name, out.size(), out.checksum()};
}

void CheckpointWriter::check_name(const std::string& name) const {
  require(state_ == State::open, "the checkpoint in ", staging_,
          " takes no more files after a commit or an error");
  require(is_checkpoint_file_name(name), "a file of a checkpoint cannot have the name \"", name,
          "\": take 1 to 200 of A-Z a-z 0-9 . _ -, no dot in front");
  for (const CheckpointFile& file : manifest_.files) {
    require(file.name != name, "the checkpoint in ", staging_, " has a file ", name, " already");
  }
}

void CheckpointWriter::adopt(const CheckpointFile& file) {
  check_name(file.name);
  manifest_.files.push_back(file);
}

void CheckpointWriter::write(const std::string& name, const std::function<void(ByteSink&)>& produce) {
  check_name(name);
  state_ = State::failed;  // until it went well
  manifest_.files.push_back(write_checkpoint_file(staging_, name, produce, files_));
  state_ = State::open;
}

std::string CheckpointWriter::commit(const CheckpointFacts& facts) {
  require(state_ == State::open, "the checkpoint in ", staging_,
          " cannot be committed after a commit or an error; write it again");
  manifest_.world_size = facts.world_size;
  manifest_.pacer_version = facts.pacer_version;
  manifest_.libraries = facts.libraries;
  const std::string text = manifest_text(manifest_);
  state_ = State::failed;
  FileWriter out(files_, staging_ + '/' + kManifestName);
  out.write(text.data(), text.size());
  out.finish();
  sync_folder(files_, staging_);
  verify_checkpoint(staging_, files_);
  const std::string folder = checkpoint_path(root_, manifest_.step);
  put_in_place(folder);
  state_ = State::committed;
  sync_folder(files_, root_);
  remove_leftovers(files_, root_);
  return folder;
}

// Renames onto the final name. A former checkpoint of that name steps aside first, to where it still counts.
void CheckpointWriter::put_in_place(const std::string& folder) {
  const std::vector<StepFolder> folders = step_folders(files_, root_);
  if (!has_checkpoint(folders, manifest_.step)) {
    rename(files_, staging_, folder);
    return;
  }
  const std::string replaced = hidden_path(root_, manifest_.step, kReplaced);
  for (const auto& [step, kind] : folders) {
    if (step == manifest_.step && kind == FolderKind::replaced) remove_folder(files_, replaced);
  }
  rename(files_, folder, replaced);
  try {
    rename(files_, staging_, folder);
  } catch (const FileError&) {
    try {
      rename(files_, replaced, folder);
    } catch (const FileError&) {
      // It counts as a checkpoint where it is.
    }
    throw;
  }
}

std::vector<CheckpointInfo> list_checkpoints(const std::string& root, FileSystem& files) {
  if (!folder_exists(files, root)) return {};
  const std::vector<StepFolder> folders = step_folders(files, root);
  std::vector<CheckpointInfo> checkpoints;
  for (const auto& [step, kind] : folders) {
    if (kind == FolderKind::checkpoint) checkpoints.push_back({step, checkpoint_path(root, step)});
    if (kind == FolderKind::replaced && !has_checkpoint(folders, step)) {
      checkpoints.push_back({step, hidden_path(root, step, kReplaced)});
    }
  }
  std::sort(checkpoints.begin(), checkpoints.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step > b.step; });
  return checkpoints;
}

CheckpointManifest verify_checkpoint(const std::string& folder, FileSystem& files) {
  CheckpointManifest manifest = read_manifest(files, folder);
  for (const CheckpointFile& file : manifest.files) {
    const std::string path = folder + '/' + file.name;
    FileReader reader(files, path);
    check_size(reader, file, path);
    check_checksum(reader.checksum(), file, path);
  }
  return manifest;
}

Checkpoint open_checkpoint(const std::string& folder, FileSystem& files) {
  std::vector<std::string> names;
  for (const CheckpointFile& file : read_manifest(files, folder).files) names.push_back(file.name);
  return open_checkpoint(folder, names, files);
}

Checkpoint open_checkpoint(const std::string& folder, const std::vector<std::string>& names,
                           FileSystem& files) {
  Checkpoint checkpoint;
  checkpoint.manifest = read_manifest(files, folder);
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
  for (CheckpointInfo& each : list_checkpoints(root, files)) {
    try {
      const int64_t step = verify_checkpoint(each.folder, files).step;
      require<FileError>(step == each.step, each.folder, "/", kManifestName, " is of step ", step);
      newest.checkpoint = std::move(each);
      break;
    } catch (const FileError& error) {
      newest.passed_over.push_back("passed over the checkpoint " + each.folder + ": " + error.what());
    }
  }
  return newest;
}

void remove_old_checkpoints(const std::string& root, int64_t keep, FileSystem& files) {
  require(keep >= 1, "cannot keep ", keep, " checkpoints; keep 1 or more");
  if (!folder_exists(files, root)) return;
  for (const auto& [step, kind] : step_folders(files, root)) {
    if (kind == FolderKind::removed) remove_folder(files, hidden_path(root, step, kRemoved));
  }
  int64_t kept = 0;
  for (const CheckpointInfo& each : list_checkpoints(root, files)) {
    if (!has_all_sizes(files, each.folder) || ++kept <= keep) continue;
    // Out of sight first, so that what is half removed is no checkpoint.
    const std::string removed = hidden_path(root, each.step, kRemoved);
    rename(files, each.folder, removed);
    remove_folder(files, removed);
  }
}

}  // namespace pacer
