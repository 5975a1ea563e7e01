// The records of one host, in a file of a folder that only this user can enter: whoever can write to the file
// can join the ranks. Records are only appended, so there is nothing to lock. Every rank keeps the file open;
// once all have it, its name can go, and a run that is killed leaves nothing behind.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <pacer/collectives/detail/store.h>

namespace pacer::detail {

class FileStore : public Store {
 public:
  // Each throws InvalidArgument for a folder that is not private, and for a file of something else.
  // Opens the file, and makes it where it is missing.
  static std::shared_ptr<FileStore> open(const std::string& path);
  // Makes the file anew, and marks it as kept by this process while it holds this object. Null where another
  // process keeps it.
  static std::shared_ptr<FileStore> keep(const std::string& path);
  // Opens the file; null unless a process keeps it.
  static std::shared_ptr<FileStore> open_kept(const std::string& path);
  ~FileStore() override;
  FileStore(const FileStore&) = delete;

  void append(const std::string& key, const std::string& record) override;
  std::vector<std::string> read(const std::string& key) override;
  bool wait_for(const std::string& key, std::chrono::milliseconds limit) override;

  // Takes the name away, if it still is this file's.
  void remove_name() noexcept;

 private:
  FileStore(std::string path, int folder, int file);
  static std::shared_ptr<FileStore> open(const std::string& path, const std::string& suffix, int flags);
  bool is_kept() const;
  void read_new();

  const std::string path_;
  const int folder_, file_;
  std::mutex mutex_;
  int64_t offset_ = 0;  // of what was not read yet
  std::map<std::string, std::vector<std::string>> records_;
};

// For the files of runs on this host: $XDG_RUNTIME_DIR/pacer, or pacer-UID in $TMPDIR or /tmp. Makes the
// folder where it is missing. Throws InvalidArgument where others may enter it.
std::string private_folder_of_user();

}  // namespace pacer::detail
