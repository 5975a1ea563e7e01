#include <pacer/files/folder_lock.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/file_descriptor.h>

namespace pacer {
namespace {

std::string this_process() {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  return detail::concatenate("process ", getpid(), " on ", host.data());
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::array<char, 64> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text.data();
}

// The file's only line, as far as there is one.
std::string owner_in(int file) {
  std::array<char, 512> text{};
  const ssize_t count = ::pread(file, text.data(), text.size() - 1, 0);
  const std::string line(text.data(), static_cast<size_t>(count > 0 ? count : 0));
  return line.substr(0, line.find('\n'));
}

// Whether the path still names the file: whoever gives a lock back removes it.
bool is_in_place(int file, const std::string& path) {
  struct stat own {
  }, named{};
  return ::fstat(file, &own) == 0 && ::stat(path.c_str(), &named) == 0 && own.st_ino == named.st_ino &&
         own.st_dev == named.st_dev;
}

// The locks of this process. Never destroyed, because global objects hold some until the very end.
struct OwnLocks {
  std::mutex mutex;
  std::unordered_set<FolderLock*> all;
};

OwnLocks& own_locks() {
  static OwnLocks& locks = *new OwnLocks;
  return locks;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder, const std::string& what, InProcess own)
    : folder_(folder), what_(what), path_(folder + (folder.back() == '/' ? "." : "/.") + what + ".lock") {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kPatience{2};
  const Clock::time_point start = Clock::now();
  while (true) {
    file_ = above_standard_streams(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    const int reason = errno;
    require<FileError>(file_ >= 0, "cannot lock the folder ", folder, " by ", path_, ": ",
                       std::strerror(reason));
    int result = 0;
    do result = ::flock(file_, LOCK_EX | LOCK_NB);
    while (result != 0 && errno == EINTR);
    const bool is_taken = result != 0 && errno == EWOULDBLOCK;
    // Else it was given back in between, or the file system names files otherwise from call to call, as one
    // that cannot lock.
    if (!is_taken && (is_in_place(file_, path_) || Clock::now() - start >= kPatience)) break;
    const std::string owner = is_taken ? owner_in(file_) : "";
    if (is_taken && own == InProcess::take_over) {
      const std::lock_guard guard(own_locks().mutex);
      for (FolderLock* former : own_locks().all) {
        if (former->what_ != what || former->file_ < 0 || !is_in_place(former->file_, path_)) continue;
        ::close(file_);
        file_ = std::exchange(former->file_, -1);
        own_locks().all.insert(this);
        return;
      }
    }
    ::close(file_);
    file_ = -1;
    const bool is_own = owner.compare(0, this_process().size() + 1, this_process() + ',') == 0;
    require(!is_taken || (!is_own && Clock::now() - start < kPatience), "the folder ", folder,
            " is in use for ", what, " by ",
            is_own          ? "another Session of this process"
            : owner.empty() ? std::string("another process")
                            : owner,
            "; give each run a folder of its own, or let the other one end first");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  {
    const std::lock_guard guard(own_locks().mutex);
    own_locks().all.insert(this);
  }
  const std::string line = this_process() + ", since " + now_text() + '\n';
  // Words for people: without them the lock is the same.
  if (::ftruncate(file_, 0) != 0 || ::pwrite(file_, line.data(), line.size(), 0) < 0) return;
}

void FolderLock::check() const {
  const std::lock_guard guard(own_locks().mutex);
  require(file_ >= 0, "another Session of this process has resumed in the folder ", folder_,
          " and goes on there, so this one may no longer write its ", what_,
          "; give each run a folder of its own, or end this Session first");
}

FolderLock::~FolderLock() {
  const std::lock_guard guard(own_locks().mutex);
  own_locks().all.erase(this);
  if (file_ < 0) return;  // taken over
  // While it is locked, so that nobody has the file but who opened it before. Where the folder has been
  // moved, the path is another run's.
  if (is_in_place(file_, path_)) ::unlink(path_.c_str());
  ::close(file_);
}

}  // namespace pacer
