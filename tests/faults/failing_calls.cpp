#include "failing_calls.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <mutex>

namespace pacer::testing {
namespace {

struct Watch {
  std::mutex mutex;
  std::string folder;
  int64_t nth = 0, calls = 0;
  long thread = 0;  // the one that counts; 0: none came yet
  CallFault fault;
};
Watch& watch() {
  static auto* const only = new Watch;  // calls come until the program has ended
  return *only;
}
std::atomic<bool> is_watching{false};

enum class Effect { reads, takes_space };
enum class Verdict { pass, fail, cut };

Verdict verdict_on(const char* path, Effect effect) {
  Watch& w = watch();
  const std::lock_guard<std::mutex> lock(w.mutex);
  if (!is_watching || std::strncmp(path, w.folder.c_str(), w.folder.size()) != 0) return Verdict::pass;
  const long thread = syscall(SYS_gettid);
  if (w.thread == 0 && thread != getpid()) w.thread = thread;
  if (thread != w.thread) return Verdict::pass;
  ++w.calls;
  const bool later = w.fault.stays && effect == Effect::takes_space && w.calls > w.nth;
  if (w.calls != w.nth && !later) return Verdict::pass;
  if (w.fault.stays && effect == Effect::reads) return Verdict::pass;
  return w.fault.error == 0 ? Verdict::cut : Verdict::fail;
}

// Runs the call, unless it is to fail.
template <class Call>
long guarded(const char* path, Effect effect, const Call& call) {
  if (is_watching && verdict_on(path, effect) == Verdict::fail) {
    errno = watch().fault.error;
    return -1;
  }
  return call();
}

struct PathOfDescriptor {
  explicit PathOfDescriptor(int file) {
    if (!is_watching) return;
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    const ssize_t length = ::readlink(link.c_str(), text.data(), text.size() - 1);
    if (length > 0) text[static_cast<size_t>(length)] = '\0';
  }
  std::array<char, 4096> text{};
};

}  // namespace

FailingCalls::FailingCalls(std::string folder, int64_t nth, CallFault fault) {
  Watch& w = watch();
  const std::lock_guard<std::mutex> lock(w.mutex);
  w.folder = std::move(folder);
  w.nth = nth;
  w.calls = w.thread = 0;
  w.fault = fault;
  is_watching = true;
}
FailingCalls::~FailingCalls() { is_watching = false; }
bool FailingCalls::has_failed() const {
  const std::lock_guard<std::mutex> lock(watch().mutex);
  return watch().calls >= watch().nth;
}

}  // namespace pacer::testing

using pacer::testing::Effect;
using pacer::testing::guarded;
using pacer::testing::PathOfDescriptor;

extern "C" {

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  const Effect effect = (flags & O_CREAT) != 0 ? Effect::takes_space : Effect::reads;
  return static_cast<int>(
      guarded(path, effect, [&] { return syscall(SYS_openat, AT_FDCWD, path, flags, mode); }));
}

ssize_t read(int file, void* data, size_t bytes) {
  return guarded(PathOfDescriptor(file).text.data(), Effect::reads,
                 [&] { return syscall(SYS_read, file, data, bytes); });
}

ssize_t write(int file, const void* data, size_t bytes) {
  using namespace pacer::testing;
  const auto verdict =
      is_watching ? verdict_on(PathOfDescriptor(file).text.data(), Effect::takes_space) : Verdict::pass;
  if (verdict == Verdict::fail) {
    errno = watch().fault.error;
    return -1;
  }
  return syscall(SYS_write, file, data, verdict == Verdict::cut ? (bytes + 1) / 2 : bytes);
}

int fsync(int file) {
  return static_cast<int>(
      guarded(PathOfDescriptor(file).text.data(), Effect::reads, [&] { return syscall(SYS_fsync, file); }));
}

// The descriptor is freed in any case, as Linux does.
int close(int file) {
  const PathOfDescriptor path(file);
  const long closed = syscall(SYS_close, file);
  return static_cast<int>(guarded(path.text.data(), Effect::reads, [&] { return closed; }));
}

int rename(const char* from, const char* to) noexcept {
  return static_cast<int>(guarded(from, Effect::reads, [&] { return syscall(SYS_rename, from, to); }));
}

int mkdir(const char* path, mode_t mode) noexcept {
  return static_cast<int>(guarded(path, Effect::takes_space, [&] { return syscall(SYS_mkdir, path, mode); }));
}

int unlink(const char* path) noexcept {
  return static_cast<int>(guarded(path, Effect::reads, [&] { return syscall(SYS_unlink, path); }));
}

int rmdir(const char* path) noexcept {
  return static_cast<int>(guarded(path, Effect::reads, [&] { return syscall(SYS_rmdir, path); }));
}

}  // extern "C"
