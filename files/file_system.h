// Files as checkpoints need them. FileSystem is the few calls of the operating system that are used, as thin
// as they are, so that a test can let any one of them fail; what stands below it retries interrupted calls,
// finishes short writes and turns failures into FileError with the path and the system's words.
// Not for logs (files/json_lines.h) and not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <pacer/files/checksum.h>

namespace pacer {

// Each call returns a value from 0 on, or -errno. Files are known by their descriptors.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // A new file for writing; -EEXIST where the name is taken, be it by a link.
  virtual int create_file(const std::string& path) = 0;
  // For reading. Neither follows a link in the last part of the path nor waits for a pipe's other end.
  virtual int open_file(const std::string& path) = 0;
  // For sync() and close() alone.
  virtual int open_folder(const std::string& path) = 0;
  // -EINVAL for what is not a regular file.
  virtual int64_t size(int file) = 0;
  // Both may move fewer bytes than asked for; a read of 0 bytes is the end of the file.
  virtual int64_t read(int file, char* data, size_t bytes) = 0;
  // The next read begins so many bytes further on, also beyond the end.
  virtual int64_t skip(int file, int64_t bytes) = 0;
  virtual int64_t write(int file, const char* data, size_t bytes) = 0;
  // Until the disk has it.
  virtual int sync(int file) = 0;
  // Frees the descriptor, whatever it returns.
  virtual int close(int file) = 0;
  virtual int rename(const std::string& from, const std::string& to) = 0;
  virtual int make_folder(const std::string& path) = 0;
  virtual int remove_file(const std::string& path) = 0;
  virtual int remove_folder(const std::string& path) = 0;
  // Appends the names in a folder, without "." and "..", in no order. Follows no link in the last part of the
  // path: ask for "folder/." where one is welcome.
  virtual int list_folder(const std::string& path, std::vector<std::string>& names) = 0;
};

// The one of this machine; lives as long as the program.
FileSystem& posix_file_system();

// Where bytes go.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  // Takes the next bytes, all of them.
  virtual void write(const void* data, size_t bytes) = 0;
};

// A new file. It counts only after finish(); without it the destructor closes what there is and says nothing.
class FileWriter final : public ByteSink {
 public:
  // FileError where the file exists.
  FileWriter(FileSystem& files, std::string path);
  ~FileWriter() override;
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(const void* data, size_t bytes) override;
  // Returns when the disk has all of it and the file is closed; nothing may be written after.
  void finish();

  // The size and the checksum of the bytes written so far.
  int64_t size() const { return size_; }
  std::string checksum() const { return checksum_.hex(); }

 private:
  FileSystem& files_;
  std::string path_;
  Checksum checksum_;
  int file_;  // opened last: nothing that may throw comes after it
  int64_t size_ = 0;
};

// A regular file, no link.
class FileReader {
 public:
  FileReader(FileSystem& files, std::string path);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  // When it was opened.
  int64_t size() const { return size_; }
  // Either may be called once, and not beside read_next. FileError where the file no longer ends where it
  // ended when it was opened.
  std::vector<char> read();
  std::string checksum();

  // Fills the buffer with the bytes that come next; FileError where the file has fewer left.
  void read_next(void* data, size_t bytes);
  // Passes over the bytes that come next without reading them; finish() then returns a checksum of the
  // others.
  void skip_next(size_t bytes);
  // After the last of them: the checksum of all that was read. FileError where the file goes on.
  std::string finish();

 private:
  // Fills as much of the buffer as the file has left.
  size_t fill(char* data, size_t bytes);
  void expect_end(int64_t read);

  FileSystem& files_;
  std::string path_;
  Checksum checksum_;  // of read_next
  int file_;           // opened last: nothing that may throw comes after it
  int64_t size_ = 0;
  int64_t at_ = 0;  // of read_next
};

// Each throws FileError; folder_exists() is false only where there is nothing, make_folder() returns false
// where there is something of that name already, and remove_folder() removes the files inside too, but no
// folder inside: then it throws.
bool folder_exists(FileSystem& files, const std::string& path);
bool make_folder(FileSystem& files, const std::string& path);
// Makes the folder and those above it, as far as they are missing; the disk has the name of each new one when
// this returns.
void make_folders(FileSystem& files, const std::string& path);
void sync_folder(FileSystem& files, const std::string& path);
void rename(FileSystem& files, const std::string& from, const std::string& to);
void remove_file(FileSystem& files, const std::string& path);
void remove_folder(FileSystem& files, const std::string& path);
std::vector<std::string> list_folder(FileSystem& files, const std::string& path);

}  // namespace pacer
