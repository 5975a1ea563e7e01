// Files of the library never become standard input, output or error of a program that was started without.
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <pacer/files/file_descriptor.h>
#include <pacer/files/file_system.h>
#include <pacer/files/json_lines.h>
#include <pacer/files/tensorboard_events.h>
#include <pacer/metrics/detail/metrics_csv.h>

#include "support/catch.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

bool is_closed(int descriptor) { return fcntl(descriptor, F_GETFD) == -1 && errno == EBADF; }

constexpr int kTaken = 10, kThrown = 20;

// What a child without the three standard descriptors found while what `open` returns was open: 0, kTaken +
// the descriptor that was taken, or kThrown.
template <class Open>
int without_standard_streams(const Open& open) {
  const pid_t child = fork();
  if (child == 0) {
    for (const int descriptor : {0, 1, 2}) close(descriptor);
    int found = 0;
    try {
      [[maybe_unused]] const auto file = open();
      for (const int descriptor : {0, 1, 2}) {
        if (!is_closed(descriptor)) found = kTaken + descriptor;
      }
    } catch (const std::exception&) {
      found = kThrown;
    }
    _exit(found);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("no file of the library takes the place of a standard stream that is closed", "[core][files]") {
  const TemporaryFolder folder;
  put_content(folder.path("old"), "text");
  FileSystem& files = posix_file_system();
  CHECK(without_standard_streams([&] { return JsonLinesFile(folder.path("a")); }) == 0);
  CHECK(without_standard_streams([&] { return detail::MetricsCsv(folder.path("b"), 0); }) == 0);
  CHECK(without_standard_streams([&] { return std::make_unique<TensorBoardFile>(folder.path("c")); }) == 0);
  CHECK(without_standard_streams([&] { return files.create_file(folder.path("d")); }) == 0);
  CHECK(without_standard_streams([&] { return files.open_file(folder.path("old")); }) == 0);
  CHECK(without_standard_streams([&] { return files.open_folder(folder.path()); }) == 0);
  // The test sees what it looks for.
  CHECK(without_standard_streams([&] { return open(folder.path("old").c_str(), O_RDONLY); }) == kTaken);
}

TEST_CASE("a descriptor above the standard streams stays, and errors keep their reason", "[core][files]") {
  const TemporaryFolder folder;
  const int descriptor = posix_file_system().create_file(folder.path("a"));
  REQUIRE(descriptor > 2);
  CHECK(above_standard_streams(descriptor) == descriptor);
  CHECK(fcntl(descriptor, F_GETFD) == FD_CLOEXEC);
  close(descriptor);
  CHECK(above_standard_streams(-1) == -1);
  CHECK_THROWS_WITH(OutputFile(folder.path("no/such"), StreamMode::append),
                    Catch::Matchers::ContainsSubstring(std::strerror(ENOENT)));
}

}  // namespace pacer::testing
