// The saving half of files/checkpoint_folder.h.
#include <pacer/core/error.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/files/checkpoint_names.h>

namespace pacer {
namespace {

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
        if (kind == StepFolderKind::partial)
          remove_folder(files, step_folder_path(root, {step, StepFolderKind::partial}));
        if (kind == StepFolderKind::removed)
          remove_folder(files, step_folder_path(root, {step, StepFolderKind::removed}));
        if (kind != StepFolderKind::replaced) return;
        const std::string replaced = step_folder_path(root, {step, StepFolderKind::replaced});
        if (has_checkpoint(folders, step)) {
          remove_folder(files, replaced);
        } else {
          rename(files, replaced, step_folder_path(root, {step, StepFolderKind::checkpoint}));
        }
      });
    }
  });
}

}  // namespace

CheckpointWriter::CheckpointWriter(FileSystem& files, std::string root, int64_t step)
    : files_(files),
      root_(std::move(root)),
      staging_(step_folder_path(root_, {step, StepFolderKind::partial})) {
  require(step >= 0, "cannot save a checkpoint of step ", step, "; steps start at 0");
  manifest_.step = step;
  make_folders(files_, root_);
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
  manifest_.is_finite = facts.is_finite;
  const std::string text = manifest_text(manifest_);
  state_ = State::failed;
  FileWriter out(files_, staging_ + '/' + kManifestName);
  out.write(text.data(), text.size());
  out.finish();
  sync_folder(files_, staging_);
  verify_checkpoint(staging_, files_);
  const std::string folder = step_folder_path(root_, {manifest_.step, StepFolderKind::checkpoint});
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
  const std::string replaced = step_folder_path(root_, {manifest_.step, StepFolderKind::replaced});
  for (const auto& [step, kind] : folders) {
    if (step == manifest_.step && kind == StepFolderKind::replaced) remove_folder(files_, replaced);
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

}  // namespace pacer
