// A folder that one run at a time writes to.
#pragma once

#include <string>

namespace pacer {

// Holds a folder while it exists. The lock is the operating system's (flock) on a hidden file, so it ends
// with the process, however that dies. The file says who has it, and is removed when the lock is given back.
// A file system without such locks locks nothing.
class FolderLock {
 public:
  // Locks `folder`, which exists, for one purpose: `what` ("checkpoints") is in the file's name,
  // ".WHAT.lock", so that a folder can be locked once for each. Waits up to 2 s for another process that is
  // about to end. InvalidArgument with process, machine and since when, where somebody has it, also this
  // process; FileError where the file cannot be made.
  FolderLock(const std::string& folder, const std::string& what);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  std::string path_;
  int file_ = -1;
};

}  // namespace pacer
