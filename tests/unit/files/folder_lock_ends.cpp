// How a FolderLock ends, and file systems on which it cannot be told whose file a path names.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include <pacer/files/folder_lock.h>

#include "support/catch.h"
#include "support/temporary_folder.h"

namespace {

// stat() of locks finds another file than fstat() does, as on file systems that make inode numbers up.
std::atomic<bool> inodes_differ{false};

}  // namespace

// Takes the place of the C library's in this program.
extern "C" int stat(const char* path, struct stat* result) noexcept {
  const int code =
      static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, result, 0));  // errno is set as by stat
  const std::string name = path;
  if (code == 0 && inodes_differ && name.size() > 5 && name.compare(name.size() - 5, 5, ".lock") == 0) {
    result->st_ino += 1;
  }
  return code;
}

namespace pacer::testing::folder_lock {
namespace {

using Clock = std::chrono::steady_clock;

// The seconds of processor time that this thread has used.
double processor_seconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

TEST_CASE("a lock that ends leaves the lock of a new folder of the same name alone", "[core][folder_lock]") {
  const TemporaryFolder root;
  const std::string folder = root.path("run"), moved = root.path("old");
  std::filesystem::create_directory(folder);
  auto former = std::make_unique<FolderLock>(folder, "metrics");
  std::filesystem::rename(folder, moved);
  std::filesystem::create_directory(folder);
  {
    const FolderLock next(folder, "metrics");
    former.reset();
    CHECK(std::filesystem::exists(folder + "/.metrics.lock"));
    CHECK_THROWS(FolderLock(folder, "metrics"));
  }
  CHECK(std::filesystem::is_empty(folder));
}

TEST_CASE("a file system whose inodes differ from call to call locks nothing, and costs a wait",
          "[core][folder_lock]") {
  const TemporaryFolder folder;
  inodes_differ = true;
  std::atomic<bool> is_done{false};
  // It makes the inodes honest in the end, so that the case fails instead of waiting forever.
  std::thread rescue([&] {
    for (int i = 0; i < 80 && !is_done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    inodes_differ = false;
  });
  const auto start = Clock::now();
  const double busy = processor_seconds();
  {
    const FolderLock lock(folder.path(), "metrics");
    lock.check();
    is_done = true;
    CHECK(Clock::now() - start < std::chrono::seconds(6));
    CHECK(processor_seconds() - busy < 0.5);
    rescue.join();
  }
}

}  // namespace pacer::testing::folder_lock
