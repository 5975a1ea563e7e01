// The file is a row of records: a mark, the lengths of key and record (32 bits each, in the machine's order),
// key, record. Each is written by one call, and read only when all of it is there.
#include <pacer/collectives/detail/file_store.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/file_descriptor.h>

namespace pacer::detail {
namespace {

struct RecordHeader {
  std::array<char, 8> mark = {'p', 'a', 'c', 'e', 'r', ' ', '2', '\n'};
  uint32_t key = 0;
  uint32_t record = 0;
};
static_assert(sizeof(RecordHeader) == 16, "the file's layout");

// Of a key or a record.
constexpr size_t kLongestRecord = 1 << 28;
constexpr mode_t kOthers = S_IRWXG | S_IRWXO;

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string name_in_folder(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Looks at the open folder, not at its name, so that nobody can exchange it in between.
int open_private_folder(const std::string& path) {
  const int folder =
      above_standard_streams(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  // A link to a folder is no folder here.
  require(folder >= 0, "the folder ", path, " cannot hold the file through which ranks meet: ",
          errno == ENOTDIR || errno == ELOOP ? "it is a link or no folder" : std::strerror(errno),
          "; name a folder of your own, made with mkdir -m 700");
  struct stat found = {};
  const bool known = ::fstat(folder, &found) == 0;
  if (known && found.st_uid == ::geteuid() && (found.st_mode & kOthers) == 0) return folder;
  ::close(folder);
  require(known && found.st_uid == ::geteuid(), "the folder ", path,
          " belongs to another user, who could join the ranks that meet there; name a folder of your own, "
          "made with mkdir -m 700");
  throw InvalidArgument("other users may enter the folder " + path +
                        " and join the ranks that meet there; run chmod 700 on it, or name another");
}

}  // namespace

FileStore::FileStore(std::string path, int folder, int file)
    : path_(std::move(path)), folder_(folder), file_(file) {}

FileStore::~FileStore() {
  ::close(file_);
  ::close(folder_);
}

// Null where there is no such file, or, with O_EXCL, where there is one.
std::shared_ptr<FileStore> FileStore::open(const std::string& path, const std::string& suffix, int flags) {
  const std::string name = name_in_folder(path);
  require(!name.empty(), "the path ", path, ", through which ranks should meet, names no file");
  const int folder = open_private_folder(folder_of(path));
  const int file = above_standard_streams(
      ::openat(folder, (name + suffix).c_str(),
               flags | O_RDWR | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, S_IRUSR | S_IWUSR));
  const int error = errno;
  struct stat found = {};
  const bool usable = file >= 0 && ::fstat(file, &found) == 0 && S_ISREG(found.st_mode);
  if (usable && found.st_uid == ::geteuid()) {
    const std::shared_ptr<FileStore> store(new FileStore(path, folder, file));
    store->read_new();  // refuses a file of something else, before anything is written
    return store;
  }
  if (file >= 0) ::close(file);
  ::close(folder);
  if (file < 0 && (error == ENOENT || error == EEXIST) && flags != O_CREAT) return nullptr;
  throw InvalidArgument(
      concatenate("ranks cannot meet through ", path, ": ",
                  file < 0 && error != ELOOP ? std::strerror(error) : "it is no plain file of this user",
                  "; name a file that does not exist yet"));
}

std::shared_ptr<FileStore> FileStore::open(const std::string& path) { return open(path, "", O_CREAT); }

// Who keeps a file holds a lock on it, which the system ends with the process.
bool FileStore::is_kept() const {
  if (::flock(file_, LOCK_SH | LOCK_NB) != 0) return errno == EWOULDBLOCK;
  ::flock(file_, LOCK_UN);
  return false;
}

std::shared_ptr<FileStore> FileStore::open_kept(const std::string& path) {
  std::shared_ptr<FileStore> store = open(path, "", 0);
  return store && store->is_kept() ? store : nullptr;
}

std::shared_ptr<FileStore> FileStore::keep(const std::string& path) {
  if (const auto old = open(path, "", 0)) {
    if (old->is_kept()) return nullptr;
    old->remove_name();  // of a run that was killed while its ranks met
  }
  // The file gets its name once it is locked.
  const std::string suffix = "." + std::to_string(::getpid()), name = name_in_folder(path);
  std::shared_ptr<FileStore> store = open(path, suffix, O_CREAT | O_EXCL);
  require<Error>(store != nullptr, "the file ", path, suffix, " is left over; delete it");
  const bool named = ::flock(store->file_, LOCK_EX | LOCK_NB) == 0 &&
                     ::linkat(store->folder_, (name + suffix).c_str(), store->folder_, name.c_str(), 0) == 0;
  const int error = errno;
  ::unlinkat(store->folder_, (name + suffix).c_str(), 0);
  require<Error>(named || error == EEXIST, "cannot make ", path, ": ", std::strerror(error));
  return named ? store : nullptr;
}

void FileStore::append(const std::string& key, const std::string& record) {
  count_requests(1);
  require<Error>(key.size() < kLongestRecord && record.size() < kLongestRecord,
                 "a record is too long: ", key);
  RecordHeader header;
  header.key = static_cast<uint32_t>(key.size());
  header.record = static_cast<uint32_t>(record.size());
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes += key + record;
  ssize_t written = 0;
  do {
    written = ::write(file_, bytes.data(), bytes.size());
  } while (written < 0 && errno == EINTR);
  require<Error>(written == static_cast<ssize_t>(bytes.size()), "cannot write to ", path_, ": ",
                 written < 0 ? std::strerror(errno) : "the disk is full");
}

void FileStore::read_new() {
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
    RecordHeader header;
    const auto left = static_cast<size_t>(end - next);
    std::memcpy(&header, next, std::min(left, sizeof(header)));  // a short rest keeps the mark of the default
    require(
        header.mark == RecordHeader().mark && header.key < kLongestRecord && header.record < kLongestRecord,
        "ranks cannot meet through ", path_,
        ": there is a file of something else; name a file that does not exist yet");
    const size_t size = sizeof(header) + header.key + header.record;
    if (left < sizeof(header) || left < size) break;
    const char* const key = next + sizeof(header);
    records_[std::string(key, header.key)].emplace_back(key + header.key, header.record);
    next += size;
  }
  offset_ += next - bytes.data();
}

std::vector<std::string> FileStore::read(const std::string& key) {
  count_requests(1);
  const std::lock_guard<std::mutex> lock(mutex_);
  read_new();
  const auto found = records_.find(key);
  return found == records_.end() ? std::vector<std::string>() : found->second;
}

bool FileStore::wait_for(const std::string& key, std::chrono::milliseconds limit) {
  count_requests(1);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      read_new();
      if (records_.count(key) != 0) return true;
    }
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void FileStore::remove_name() noexcept {
  const std::string name = name_in_folder(path_);
  struct stat named = {}, own = {};
  if (::fstatat(folder_, name.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 && ::fstat(file_, &own) == 0 &&
      named.st_dev == own.st_dev && named.st_ino == own.st_ino) {
    ::unlinkat(folder_, name.c_str(), 0);
  }
}

std::string private_folder_of_user() {
  std::string folder = variable("XDG_RUNTIME_DIR");
  if (!folder.empty()) {
    folder += "/pacer";
  } else {
    const std::string temporary = variable("TMPDIR");
    folder = (temporary.empty() ? "/tmp" : temporary) + "/pacer-" + std::to_string(::geteuid());
  }
  require(::mkdir(folder.c_str(), S_IRWXU) == 0 || errno == EEXIST, "cannot make the folder ", folder,
          ", where the processes of a run on this host would meet: ", std::strerror(errno),
          "; set TMPDIR to a folder where this user can write");
  ::close(open_private_folder(folder));
  return folder;
}

}  // namespace pacer::detail
