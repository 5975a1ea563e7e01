// A folder for one run of a program, readable by nobody else, and gone when the program is, however that
// ends: a second process keeps it, sees through a pipe that the first one is no more (kill -9 closes pipes,
// too), removes the folder and ends.
#pragma once

#include <sys/types.h>

#include <string>

namespace examples {

class PrivateFolder {
 public:
  // Mode 0700, in the folder that TMPDIR names, else in /tmp. Throws pacer::FileError.
  PrivateFolder();
  // Returns when the folder is gone.
  ~PrivateFolder();
  PrivateFolder(const PrivateFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int lifeline_ = -1;  // the pipe's end that only this process holds
  pid_t keeper_ = -1;
};

}  // namespace examples
