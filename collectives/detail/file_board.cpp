// The file is a row of notices: a mark, the lengths of key and text (32 bits each, in the machine's order),
// key, text. Each is written by one call, and read only when all of it is there.
#include <pacer/collectives/detail/file_board.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include <pacer/collectives/detail/rendezvous_folder.h>
#include <pacer/core/error.h>
#include <pacer/core/file_descriptor.h>

namespace pacer::detail {
namespace {

struct NoticeHeader {
  std::array<char, 8> mark = {'p', 'a', 'c', 'e', 'r', ' ', '1', '\n'};
  uint32_t key = 0;
  uint32_t text = 0;
};
static_assert(sizeof(NoticeHeader) == 16, "the file's layout");

// Of a key or a text; more than any notice has.
constexpr size_t kLongest = 1 << 20;

}  // namespace

FileBoard::FileBoard(const std::string& path) : path_(path) {
  const std::string name = name_in_folder(path);
  require(!name.empty(), "the path ", path, ", through which ranks should meet, names no file");
  folder_ = open_private_folder(folder_of(path));
  file_ = above_standard_streams(::openat(folder_, name.c_str(),
                                          O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC,
                                          S_IRUSR | S_IWUSR));
  const int error = errno;
  struct stat found = {};
  const bool usable = file_ >= 0 && ::fstat(file_, &found) == 0 && S_ISREG(found.st_mode);
  if (usable && found.st_uid == ::geteuid()) return;
  if (file_ >= 0) ::close(file_);
  ::close(folder_);
  throw InvalidArgument(
      concatenate("ranks cannot meet through ", path, ": ",
                  file_ < 0 && error != ELOOP ? std::strerror(error) : "it is no plain file of this user",
                  "; name a file that does not exist yet"));
}

FileBoard::~FileBoard() {
  ::close(file_);
  ::close(folder_);
}

void FileBoard::post(const std::string& key, const std::string& text) {
  require<Error>(key.size() < kLongest && text.size() < kLongest, "a notice is too long: ", key);
  NoticeHeader header;
  header.key = static_cast<uint32_t>(key.size());
  header.text = static_cast<uint32_t>(text.size());
  std::string notice(reinterpret_cast<const char*>(&header), sizeof(header));
  notice += key + text;
  ssize_t written = 0;
  do {
    written = ::write(file_, notice.data(), notice.size());
  } while (written < 0 && errno == EINTR);
  require<Error>(written == static_cast<ssize_t>(notice.size()), "cannot write to ", path_, ": ",
                 written < 0 ? std::strerror(errno) : "the disk is full");
}

void FileBoard::read_new() {
  struct stat now = {};
  require<Error>(::fstat(file_, &now) == 0, "cannot read ", path_, ": ", std::strerror(errno));
  if (now.st_size <= offset_) return;
  std::vector<char> bytes(static_cast<size_t>(now.st_size - offset_));
  ssize_t count = 0;
  do {
    count = ::pread(file_, bytes.data(), bytes.size(), offset_);
  } while (count < 0 && errno == EINTR);
  require<Error>(count >= 0, "cannot read ", path_, ": ", std::strerror(errno));

  const char* next = bytes.data();
  const char* const end = next + count;
  while (next < end) {
    NoticeHeader header;
    const auto left = static_cast<size_t>(end - next);
    std::memcpy(&header, next, std::min(left, sizeof(header)));  // a short rest keeps the mark of the default
    require(header.mark == NoticeHeader().mark && header.key < kLongest && header.text < kLongest,
            "ranks cannot meet through ", path_,
            ": there is a file of something else; name a file that does not exist yet");
    const size_t size = sizeof(header) + header.key + header.text;
    if (left < sizeof(header) || left < size) break;
    const char* const key = next + sizeof(header);
    notices_.emplace(std::string(key, header.key), std::string(key + header.key, header.text));
    next += size;
  }
  offset_ += next - bytes.data();
}

std::optional<std::string> FileBoard::read(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  read_new();
  const auto found = notices_.find(key);
  if (found == notices_.end()) return std::nullopt;
  return found->second;
}

void FileBoard::remove_name() noexcept {
  const std::string name = name_in_folder(path_);
  struct stat named = {}, own = {};
  if (::fstatat(folder_, name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 && ::fstat(file_, &own) == 0 &&
      named.st_dev == own.st_dev && named.st_ino == own.st_ino) {
    ::unlinkat(folder_, name.c_str(), 0);
  }
}

}  // namespace pacer::detail
