// FolderLock: one process at a time, whatever becomes of it.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include <pacer/core/error.h>
#include <pacer/files/folder_lock.h>

#include "support/catch.h"
#include "support/temporary_folder.h"

namespace pacer::testing::folder_lock {
namespace {

using Catch::Matchers::ContainsSubstring;

std::string refusal_of(const std::string& folder, const std::string& what) {
  try {
    const FolderLock lock(folder, what);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

// A process that has the folder until it is killed.
class Holder {
 public:
  explicit Holder(const std::string& folder) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    child_ = fork();
    if (child_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        const FolderLock lock(folder, "metrics");
        const char ready = 1;
        if (write(ends[1], &ready, 1) != 1) _exit(1);
        close(ends[1]);
        while (true) pause();
      } catch (...) {
        _exit(2);  // it must not go on with the tests
      }
    }
    close(ends[1]);
    char ready = 0;
    REQUIRE(read(ends[0], &ready, 1) == 1);
    close(ends[0]);
  }
  ~Holder() { end(); }
  Holder(const Holder&) = delete;
  void end() {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    child_ = 0;
  }
  pid_t child() const { return child_; }

 private:
  pid_t child_ = 0;
};

}  // namespace

TEST_CASE("a folder is locked for one purpose at a time, and free afterwards", "[core][folder_lock]") {
  const TemporaryFolder folder;
  {
    const FolderLock lock(folder.path(), "metrics");
    CHECK_THAT(refusal_of(folder.path(), "metrics"), ContainsSubstring("another Session of this process"));
    CHECK(refusal_of(folder.path(), "checkpoints") == "");
  }
  CHECK(refusal_of(folder.path(), "metrics") == "");
  CHECK(std::filesystem::is_empty(folder.path()));
  CHECK_THROWS_AS(FolderLock(folder.path("not/there"), "metrics"), FileError);
}

TEST_CASE("in one process a run that goes on takes the folder over", "[core][folder_lock]") {
  const TemporaryFolder folder;
  {
    const FolderLock former(folder.path(), "metrics");
    former.check();
    {
      const FolderLock next(folder.path(), "metrics", FolderLock::resuming(true));
      next.check();
      CHECK_THROWS_WITH(former.check(), ContainsSubstring("has resumed in the folder " + folder.path()));
      CHECK_THAT(refusal_of(folder.path(), "metrics"), ContainsSubstring("another Session of this process"));
    }
    CHECK(refusal_of(folder.path(), "metrics") == "");
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("another process that has the folder is named, and its death frees it", "[core][folder_lock]") {
  const TemporaryFolder folder;
  Holder holder(folder.path());
  const std::string message = refusal_of(folder.path(), "metrics");
  CHECK_THAT(message, ContainsSubstring("process " + std::to_string(holder.child()) + " on "));
  CHECK_THAT(message, ContainsSubstring(", since 20"));
  CHECK_THAT(message, ContainsSubstring(" UTC"));
  holder.end();
  CHECK(refusal_of(folder.path(), "metrics") == "");
  CHECK(std::filesystem::is_empty(folder.path()));
}

}  // namespace pacer::testing::folder_lock
