#include <pacer/files/file_system.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <pacer/core/error.h>

namespace pacer {
namespace {

template <class Call>
int64_t retried(const Call& call) {
  int64_t result;
  do result = call();
  while (result == -EINTR);
  return result;
}

// The result of a call; the parts say what could not be done, path included.
template <class... Parts>
int64_t checked(int64_t result, const Parts&... parts) {
  require<FileError>(result >= 0, "cannot ", parts..., ": ", std::strerror(static_cast<int>(-result)));
  return result;
}

}  // namespace

FileWriter::FileWriter(FileSystem& files, std::string path)
    : files_(files),
      path_(std::move(path)),
      file_(static_cast<int>(checked(retried([&] { return files_.create_file(path_); }), "create ", path_))) {
}

FileWriter::~FileWriter() {
  if (file_ >= 0) files_.close(file_);
}

void FileWriter::write(const void* data, size_t bytes) {
  require(file_ >= 0, "cannot write to ", path_, " after finish()");
  const char* at = static_cast<const char*>(data);
  checksum_.add(data, bytes);
  size_ += static_cast<int64_t>(bytes);
  while (bytes > 0) {
    const int64_t result = retried([&] { return files_.write(file_, at, bytes); });
    // A write of nothing would go on for ever.
    const auto written = static_cast<size_t>(checked(result == 0 ? -EIO : result, "write to ", path_));
    at += written;
    bytes -= written;
  }
}

void FileWriter::finish() {
  require(file_ >= 0, "cannot finish ", path_, " twice");
  checked(retried([&] { return files_.sync(file_); }), "sync ", path_);
  const int result = files_.close(file_);
  file_ = -1;
  // An interrupted close has closed (Linux), and after the sync nothing was left to be written.
  if (result != -EINTR) checked(result, "close ", path_);
}

FileReader::FileReader(FileSystem& files, std::string path)
    : files_(files),
      path_(std::move(path)),
      file_(static_cast<int>(checked(retried([&] { return files_.open_file(path_); }), "open ", path_))) {
  size_ = retried([&] { return files_.size(file_); });
  if (size_ >= 0) return;
  files_.close(file_);
  require<FileError>(size_ != -EINVAL, "cannot read ", path_, ": it is not a regular file");
  checked(size_, "read the size of ", path_);
}

FileReader::~FileReader() { files_.close(file_); }

size_t FileReader::fill(char* data, size_t bytes) {
  size_t filled = 0;
  while (filled < bytes) {
    const int64_t result = retried([&] { return files_.read(file_, data + filled, bytes - filled); });
    const auto got = static_cast<size_t>(checked(result, "read ", path_, " from byte ", filled));
    if (got == 0) break;
    filled += got;
  }
  return filled;
}

void FileReader::expect_end(int64_t read) {
  char beyond;
  const bool ends = read < size_ || fill(&beyond, 1) == 0;
  require<FileError>(read == size_ && ends, "cannot read ", path_, ": it had ", size_,
                     " bytes when it was opened and changed while it was read");
}

std::vector<char> FileReader::read() {
  std::vector<char> bytes(static_cast<size_t>(size_));
  expect_end(static_cast<int64_t>(fill(bytes.data(), bytes.size())));
  return bytes;
}

std::string FileReader::checksum() {
  constexpr size_t kPiece = size_t{1} << 20;
  std::vector<char> piece(std::min(kPiece, static_cast<size_t>(size_)));
  Checksum checksum;
  int64_t read = 0;
  while (read < size_) {
    const size_t wanted = std::min(piece.size(), static_cast<size_t>(size_ - read));
    const size_t got = fill(piece.data(), wanted);
    checksum.add(piece.data(), got);
    read += static_cast<int64_t>(got);
    if (got < wanted) break;
  }
  expect_end(read);
  return checksum.hex();
}

void FileReader::read_next(void* data, size_t bytes) {
  const size_t got = fill(static_cast<char*>(data), bytes);
  checksum_.add(data, got);
  at_ += static_cast<int64_t>(got);
  require<FileError>(got == bytes, "cannot read ", path_, ": it ends at byte ", at_, ", ", bytes - got,
                     " bytes too early");
}

void FileReader::skip_next(size_t bytes) {
  checked(files_.skip(file_, static_cast<int64_t>(bytes)), "read ", path_, " behind byte ", at_);
  at_ += static_cast<int64_t>(bytes);
}

std::string FileReader::finish() {
  expect_end(at_);
  return checksum_.hex();
}

bool folder_exists(FileSystem& files, const std::string& path) {
  const int64_t opened = retried([&] { return files.open_folder(path); });
  if (opened == -ENOENT) return false;
  files.close(static_cast<int>(checked(opened, "open the folder ", path)));
  return true;
}

bool make_folder(FileSystem& files, const std::string& path) {
  const int64_t result = retried([&] { return files.make_folder(path); });
  if (result == -EEXIST) return false;
  checked(result, "make the folder ", path);
  return true;
}

void make_folders(FileSystem& files, const std::string& path) {
  if (folder_exists(files, path)) return;
  const size_t slash = path.find_last_of('/');
  if (slash != std::string::npos && slash > 0) {
    try {
      make_folders(files, path.substr(0, slash));
    } catch (const FileError& error) {
      throw FileError("cannot make the folder " + path + ": " + error.what());
    }
  }
  if (make_folder(files, path)) sync_folder(files, path + "/..");
}

void sync_folder(FileSystem& files, const std::string& path) {
  const int64_t opened = retried([&] { return files.open_folder(path); });
  const int folder = static_cast<int>(checked(opened, "open the folder ", path));
  const int64_t result = retried([&] { return files.sync(folder); });
  files.close(folder);
  // EINVAL: a file system whose folders cannot be synced, nor need it.
  if (result != -EINVAL) checked(result, "sync the folder ", path);
}

void rename(FileSystem& files, const std::string& from, const std::string& to) {
  checked(retried([&] { return files.rename(from, to); }), "rename ", from, " to ", to);
}

void remove_file(FileSystem& files, const std::string& path) {
  checked(retried([&] { return files.remove_file(path); }), "remove ", path);
}

void remove_folder(FileSystem& files, const std::string& path) {
  for (const std::string& name : list_folder(files, path)) remove_file(files, path + '/' + name);
  checked(retried([&] { return files.remove_folder(path); }), "remove the folder ", path);
}

std::vector<std::string> list_folder(FileSystem& files, const std::string& path) {
  std::vector<std::string> names;
  const auto listed = [&] {
    names.clear();
    return files.list_folder(path, names);
  };
  checked(retried(listed), "list the folder ", path);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace pacer
