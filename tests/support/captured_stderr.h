// Takes what the process writes to stderr while it lives.
#pragma once

#include <cstdio>
#include <string>

#include <unistd.h>

namespace pacer::testing {

class CapturedStderr {
 public:
  CapturedStderr() : file_(std::tmpfile()), before_(dup(STDERR_FILENO)) {
    std::fflush(stderr);
    dup2(fileno(file_), STDERR_FILENO);
  }
  ~CapturedStderr() {
    std::fflush(stderr);
    dup2(before_, STDERR_FILENO);
    close(before_);
    std::fclose(file_);
  }
  CapturedStderr(const CapturedStderr&) = delete;

  std::string text() const {
    std::fflush(stderr);
    std::string text;
    const long end = lseek(fileno(file_), 0, SEEK_END);
    text.resize(static_cast<size_t>(end));
    const ssize_t read = pread(fileno(file_), text.data(), text.size(), 0);
    text.resize(read < 0 ? 0 : static_cast<size_t>(read));
    return text;
  }

 private:
  std::FILE* file_;
  int before_;
};

}  // namespace pacer::testing
