// A notice board in a file, for ranks of one host. Notices are appended and never changed, so there is
// nothing to lock. Every rank keeps the file open; once all have it, its name can go, and a run that is
// killed leaves nothing behind.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

class FileBoard : public NoticeBoard {
 public:
  // Makes the file where it is missing. Throws InvalidArgument for a folder that is not private, and for a
  // file that is no notice board.
  explicit FileBoard(const std::string& path);
  ~FileBoard() override;
  FileBoard(const FileBoard&) = delete;

  // The first notice of a key stays; later ones are not seen.
  void post(const std::string& key, const std::string& text) override;
  std::optional<std::string> read(const std::string& key) override;

  // Takes the name away, if it still is this file's.
  void remove_name() noexcept;

 private:
  void read_new();

  const std::string path_;
  int folder_ = -1;
  int file_ = -1;
  std::mutex mutex_;
  int64_t offset_ = 0;  // of what was not read yet
  std::map<std::string, std::string> notices_;
};

}  // namespace pacer::detail
