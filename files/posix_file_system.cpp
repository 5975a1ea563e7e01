// FileSystem over the calls of POSIX, and nothing that decides anything.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <string_view>

#include <pacer/files/file_descriptor.h>
#include <pacer/files/file_system.h>

namespace pacer {
namespace {

// Opens for this process alone, never as standard input, output or error.
int open_descriptor(const std::string& path, int flags) {
  return above_standard_streams(::open(path.c_str(), flags | O_CLOEXEC, 0666));
}

template <class Result>
Result result_or_errno(Result result) {
  return result >= 0 ? result : -errno;
}

class PosixFileSystem final : public FileSystem {
 public:
  int create_file(const std::string& path) override {
    return result_or_errno(open_descriptor(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW));
  }
  int open_file(const std::string& path) override {
    return result_or_errno(open_descriptor(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY));
  }
  int open_folder(const std::string& path) override {
    return result_or_errno(open_descriptor(path, O_RDONLY | O_DIRECTORY));
  }
  int64_t size(int file) override {
    struct stat facts;
    if (::fstat(file, &facts) != 0) return -errno;
    return S_ISREG(facts.st_mode) ? static_cast<int64_t>(facts.st_size) : -EINVAL;
  }
  int64_t read(int file, char* data, size_t bytes) override {
    return result_or_errno<int64_t>(::read(file, data, bytes));
  }
  int64_t skip(int file, int64_t bytes) override {
    return result_or_errno<int64_t>(::lseek(file, static_cast<off_t>(bytes), SEEK_CUR));
  }
  int64_t write(int file, const char* data, size_t bytes) override {
    return result_or_errno<int64_t>(::write(file, data, bytes));
  }
  int sync(int file) override { return result_or_errno(::fsync(file)); }
  int close(int file) override { return result_or_errno(::close(file)); }
  int rename(const std::string& from, const std::string& to) override {
    return result_or_errno(::rename(from.c_str(), to.c_str()));
  }
  int make_folder(const std::string& path) override { return result_or_errno(::mkdir(path.c_str(), 0777)); }
  int remove_file(const std::string& path) override { return result_or_errno(::unlink(path.c_str())); }
  int remove_folder(const std::string& path) override { return result_or_errno(::rmdir(path.c_str())); }
  int list_folder(const std::string& path, std::vector<std::string>& names) override {
    const int file = open_descriptor(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (file < 0) return -errno;
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(::fdopendir(file), &::closedir);
    if (folder == nullptr) {
      const int error = errno;
      ::close(file);
      return -error;
    }
    errno = 0;
    while (const dirent* entry = ::readdir(folder.get())) {
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);  // may throw for want of memory
      errno = 0;
    }
    return -errno;
  }
};

}  // namespace

FileSystem& posix_file_system() {
  static PosixFileSystem files;
  return files;
}

}  // namespace pacer
