#include "support/private_folder.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include <pacer/core/error.h>

namespace examples {
namespace {

std::string new_folder() {
  const char* parent = std::getenv("TMPDIR");
  std::string path = std::string(parent == nullptr || *parent == '\0' ? "/tmp" : parent) + "/pacer-XXXXXX";
  pacer::require<pacer::FileError>(mkdtemp(path.data()) != nullptr, "cannot make a private folder ", path,
                                   ": ", std::strerror(errno),
                                   "; let TMPDIR name a folder that can be written to");
  return path;
}

// What the keeper does. It holds nothing that others might wait for: no terminal, no output, no pipe but its
// own.
[[noreturn]] void keep(const std::string& path, int lifeline) {
  setsid();  // so that neither Ctrl-C nor a signal to the program's group ends it
  if (lifeline > 0) close_range(0, static_cast<unsigned>(lifeline) - 1, 0);
  close_range(static_cast<unsigned>(lifeline) + 1, ~0u, 0);
  char nothing = 0;
  while (read(lifeline, &nothing, 1) < 0 && errno == EINTR) {
  }
  std::error_code error;
  // Again and again, as ranks that are being killed might still write here.
  for (int attempt = 0; attempt < 20; ++attempt) {
    std::filesystem::remove_all(path, error);
    if (!error && !std::filesystem::exists(path, error)) break;
    usleep(50'000);
  }
  _exit(0);
}

}  // namespace

PrivateFolder::PrivateFolder() : path_(new_folder()) {
  int ends[2] = {-1, -1};
  const bool connected = pipe2(ends, O_CLOEXEC) == 0;
  if (connected) keeper_ = fork();
  if (keeper_ == 0) {
    close(ends[1]);
    keep(path_, ends[0]);
  }
  const int reason = errno;
  if (connected) close(ends[0]);
  lifeline_ = ends[1];
  if (keeper_ > 0) return;
  if (connected) close(lifeline_);
  rmdir(path_.c_str());
  throw pacer::FileError("cannot start the process that keeps " + path_ + ": " + std::strerror(reason));
}

PrivateFolder::~PrivateFolder() {
  close(lifeline_);
  while (waitpid(keeper_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace examples
