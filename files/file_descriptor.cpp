#include <pacer/files/file_descriptor.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <pacer/core/error.h>

namespace pacer {

int above_standard_streams(int descriptor) {
  if (descriptor < 0 || descriptor > STDERR_FILENO) return descriptor;
  const int moved = ::fcntl(descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int reason = errno;
  ::close(descriptor);
  errno = reason;
  return moved;
}

namespace {

// Null with errno set.
std::FILE* open_stream(const std::string& path, StreamMode mode) {
  const bool append = mode == StreamMode::append;
  const int descriptor = above_standard_streams(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : O_TRUNC), 0666));
  if (descriptor < 0) return nullptr;
  std::FILE* const stream = ::fdopen(descriptor, append ? "a" : "w");
  const int reason = errno;
  if (stream == nullptr) ::close(descriptor);
  errno = reason;
  return stream;
}

}  // namespace

OutputFile::OutputFile(const std::string& path, StreamMode mode)
    : path_(path), file_(open_stream(path, mode)) {
  require<FileError>(file_ != nullptr, "cannot open ", path, " for writing: ", std::strerror(errno));
}

void OutputFile::write(const std::string& text) {
  const bool written =
      std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() && std::fflush(file_.get()) == 0;
  const int error = errno;
  require<FileError>(written, "cannot write to ", path_, ": ", std::strerror(error));
}

}  // namespace pacer
