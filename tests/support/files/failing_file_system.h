// A file system whose n-th call fails: counted from arm(), passed on to another file system otherwise.
#pragma once

#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include <pacer/files/file_system.h>

namespace pacer::testing {

enum class Fault {
  io_error,        // EIO, once
  no_space,        // ENOSPC, once
  interrupted,     // EINTR, once
  short_transfer,  // a read or write of half of what was asked for, once
  full_disk,       // ENOSPC for every file, folder and byte that is new from there on
  dead,            // EIO for every call from there on, as if the process had been killed
};

class FailingFileSystem final : public FileSystem {
 public:
  explicit FailingFileSystem(FileSystem& under) : under_(under) {}

  void arm(int64_t call, Fault fault) {
    call_ = call;
    fault_ = fault;
    calls_ = 0;
  }
  // Whether the call to fail was reached.
  bool has_failed() const { return calls_ >= call_; }

  int create_file(const std::string& path) override {
    const int error = next(true);
    return error < 0 ? error : under_.create_file(path);
  }
  int open_file(const std::string& path) override {
    const int error = next(false);
    return error < 0 ? error : under_.open_file(path);
  }
  int open_folder(const std::string& path) override {
    const int error = next(false);
    return error < 0 ? error : under_.open_folder(path);
  }
  int64_t size(int file) override {
    const int error = next(false);
    return error < 0 ? error : under_.size(file);
  }
  int64_t read(int file, char* data, size_t bytes) override {
    const int error = next(false);
    return error < 0 ? error : under_.read(file, data, error == kShort ? (bytes + 1) / 2 : bytes);
  }
  int64_t skip(int file, int64_t bytes) override {
    const int error = next(false);
    return error < 0 ? error : under_.skip(file, bytes);
  }
  int64_t write(int file, const char* data, size_t bytes) override {
    const int error = next(true);
    return error < 0 ? error : under_.write(file, data, error == kShort ? (bytes + 1) / 2 : bytes);
  }
  int sync(int file) override {
    const int error = next(false);
    return error < 0 ? error : under_.sync(file);
  }
  // The descriptor is freed in any case, as Linux does.
  int close(int file) override {
    const int error = next(false), closed = under_.close(file);
    return error < 0 ? error : closed;
  }
  int rename(const std::string& from, const std::string& to) override {
    const int error = next(false);
    return error < 0 ? error : under_.rename(from, to);
  }
  int make_folder(const std::string& path) override {
    const int error = next(true);
    return error < 0 ? error : under_.make_folder(path);
  }
  int remove_file(const std::string& path) override {
    const int error = next(false);
    return error < 0 ? error : under_.remove_file(path);
  }
  int remove_folder(const std::string& path) override {
    const int error = next(false);
    return error < 0 ? error : under_.remove_folder(path);
  }
  int list_folder(const std::string& path, std::vector<std::string>& names) override {
    const int error = next(false);
    return error < 0 ? error : under_.list_folder(path, names);
  }

 private:
  static constexpr int kShort = 1;

  // A negative errno, kShort, or 0 to go on.
  int next(bool takes_space) {
    ++calls_;
    if (calls_ < call_) return 0;
    if (fault_ == Fault::dead) return -EIO;
    if (fault_ == Fault::full_disk) return takes_space ? -ENOSPC : 0;
    if (calls_ > call_) return 0;
    if (fault_ == Fault::io_error) return -EIO;
    if (fault_ == Fault::no_space) return -ENOSPC;
    return fault_ == Fault::interrupted ? -EINTR : kShort;
  }

  FileSystem& under_;
  int64_t call_ = INT64_MAX;
  Fault fault_ = Fault::io_error;
  int64_t calls_ = 0;
};

}  // namespace pacer::testing
