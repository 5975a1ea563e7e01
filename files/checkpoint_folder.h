// A checkpoint on disk: a folder `step-0000001000` under a root, with files and the manifest that was written
// last. A save that fails or dies at any point, a power cut included, leaves the previous checkpoint as it
// was. Knows nothing of what the files hold. One process at a time has a CheckpointWriter under a root;
// others may write files into its folder and tell it of them.
//
// Names under the root, besides the user's own, which are left alone:
//   step-0000001000             a checkpoint
//   .step-0000001000.partial    a save under way, or a dead one: removed by the next commit
//   .step-0000001000.replaced   the former checkpoint of a step saved again. It counts as a checkpoint until
//                               the new one is in place, and is put back by the next commit if that failed
//   .step-0000001000.removed    half removed: the next commit does the rest
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/files/checkpoint_manifest.h>
#include <pacer/files/file_system.h>

namespace pacer {

// What a commit adds to the manifest beside the step and the files.
struct CheckpointFacts {
  int64_t world_size = 1;
  std::string pacer_version;
  std::map<std::string, std::string> libraries;  // name, version
  bool is_finite = true;                         // its parameters are
};

// Saves one checkpoint:
//   CheckpointWriter writer(posix_file_system(), "checkpoints", 1000);
//   writer.write("model.safetensors", [&](ByteSink& out) { write_safetensors(out, tensors); });
//   writer.commit({world_size, kVersion, {{"libtorch", "2.11.0"}}});
// Without commit() the destructor removes what was written. Every function throws FileError with the path and
// the system's words where a call fails; after one, nothing but destruction is left to do.
class CheckpointWriter {
 public:
  // Makes the root and what is missing above it, and the folder of the save under way.
  CheckpointWriter(FileSystem& files, std::string root, int64_t step);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Where the save under way has its files, for other processes' write_checkpoint_file.
  const std::string& staging() const { return staging_; }
  // Takes in a file that another process has written there.
  void adopt(const CheckpointFile& file);

  // A file of the checkpoint: what `produce` writes, on the disk when this returns. InvalidArgument for a
  // name that was written already or that is_checkpoint_file_name() refuses.
  void write(const std::string& name, const std::function<void(ByteSink&)>& produce);

  // Writes the manifest, reads everything back, and puts the checkpoint in its place, replacing one of the
  // same step; then removes what dead saves left. Returns the folder.
  std::string commit(const CheckpointFacts& facts);

 private:
  void check_name(const std::string& name) const;
  void put_in_place(const std::string& folder);

  FileSystem& files_;
  std::string root_;
  std::string staging_;
  CheckpointManifest manifest_;
  enum class State { open, failed, committed } state_ = State::open;
};

// What `produce` writes, as a file of the folder, on the disk when this returns. FileError where that fails.
CheckpointFile write_checkpoint_file(const std::string& folder, const std::string& name,
                                     const std::function<void(ByteSink&)>& produce,
                                     FileSystem& files = posix_file_system());

// A checkpoint on disk, known by its name alone; nothing of it was read.
struct CheckpointInfo {
  int64_t step = 0;
  std::string folder;
};

// The checkpoints under a root by their names, newest first; none where the root does not exist. Their
// contents are not looked at.
std::vector<CheckpointInfo> list_checkpoints(const std::string& root,
                                             FileSystem& files = posix_file_system());

// A checkpoint in memory.
struct Checkpoint {
  CheckpointManifest manifest;
  std::map<std::string, std::vector<char>> files;  // by name
};

// Reads and verifies everything. FileError with the file and what is wrong: one that is missing, a size or
// checksum that differs, anything in the manifest.
Checkpoint open_checkpoint(const std::string& folder, FileSystem& files = posix_file_system());

// The same for the files of these names alone; those that the manifest does not list are left out.
Checkpoint open_checkpoint(const std::string& folder, const std::vector<std::string>& names,
                           FileSystem& files = posix_file_system());

// The manifest of a checkpoint alone; FileError where it is not whole.
CheckpointManifest read_manifest(const std::string& folder, FileSystem& files = posix_file_system());

// Hands a file of the checkpoint to `consume`, which must read all of it by FileReader::read_next, and then
// compares the checksum: believe what was read once this has returned. FileError where size or checksum
// differ from the manifest's.
void read_checkpoint_file(const std::string& folder, const CheckpointFile& file,
                          const std::function<void(FileReader&)>& consume,
                          FileSystem& files = posix_file_system());

// The same verification in pieces of 1 MiB; keeps only the manifest.
CheckpointManifest verify_checkpoint(const std::string& folder, FileSystem& files = posix_file_system());

// The same for a checkpoint that list_checkpoints found; FileError also where its manifest is of another step
// than its name, as that of a folder that was renamed.
CheckpointManifest verify_checkpoint(const CheckpointInfo& checkpoint,
                                     FileSystem& files = posix_file_system());

// The sentence that names a checkpoint which a search passed over, and why.
std::string passed_over(const CheckpointInfo& checkpoint, const FileError& why);

// What a search for the newest complete checkpoint found.
struct NewestCheckpoint {
  std::optional<CheckpointInfo> checkpoint;  // nothing where none verifies
  // A sentence for each that was passed over: its folder and what is wrong. Where none has finite parameters,
  // these are all others, and one of the sentences is that this one was taken.
  std::vector<std::string> passed_over;
};

// The newest that verifies and whose parameters are finite; where none has finite ones, the newest that
// verifies.
NewestCheckpoint find_newest_checkpoint(const std::string& root, FileSystem& files = posix_file_system());

// A checkpoint that could not be removed.
struct RemovalFailure {
  int64_t step = 0;
  std::string reason;  // a sentence with the path and the system's words
};

// Removes all but the newest `keep` (1 or more) of those whose manifest is whole and whose files have their
// sizes. Damaged ones, and those of steps after `newest_step`, which this run did not write, count for
// nothing and stay, for whoever wants to find out why. The newest whose parameters are finite stays beside
// the newest `keep`, and so does that of the step `stays`, where one is given. What cannot be removed (a folder inside, a file that a network file system still holds)
// is named in the result and tried again by the next call; only `keep` below 1 and a root that cannot be
// listed throw.
std::vector<RemovalFailure> remove_old_checkpoints(const std::string& root, int64_t keep,
                                                   FileSystem& files = posix_file_system(),
                                                   int64_t newest_step = INT64_MAX,
                                                   std::optional<int64_t> stays = std::nullopt);

}  // namespace pacer
