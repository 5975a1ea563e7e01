// How processes that write files of one checkpoint tell the one that completes it, without a message between
// them: each leaves a record in the folder of the save under way, with the names, sizes and checksums of its
// files, or why it has none. A record is there whole or not at all. The folder is on a file system that all
// of them share; it is new for each save, so that no record is of an older one.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <pacer/files/checkpoint_manifest.h>
#include <pacer/files/file_system.h>

namespace pacer {

// What one process has to say of its files.
struct SaveRecord {
  std::vector<CheckpointFile> files;
  std::string failure;    // empty: the files are complete and on the disk
  bool is_finite = true;  // the parameters among what it wrote are
};

// Leaves the record of process number `rank`. FileError where that fails.
void leave_record(const std::string& staging, int rank, const SaveRecord& record,
                  FileSystem& files = posix_file_system());

// The record of process number `rank`, which is taken away; nothing as long as there is none. FileError for a
// record that is damaged.
std::optional<SaveRecord> take_record(const std::string& staging, int rank,
                                      FileSystem& files = posix_file_system());

}  // namespace pacer
