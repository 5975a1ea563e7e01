// A folder that one run at a time writes to.
#pragma once

#include <string>

namespace pacer {

// Holds a folder while it exists. The lock is the operating system's (flock) on a hidden file, so it ends
// with the process, however that dies. The file says who has it, and is removed when the lock is given back,
// unless the folder was moved. A file system without such locks locks nothing, nor does one whose files have
// other numbers from call to call, where the file stays.
class FolderLock {
 public:
  // What becomes of a lock that this process has already: a run that goes on from what the former one wrote
  // takes it over, any other is refused.
  enum class InProcess { refuse, take_over };
  static InProcess resuming(bool does) { return does ? InProcess::take_over : InProcess::refuse; }

  // Locks `folder`, which exists, for one purpose: `what` ("checkpoints") is in the file's name,
  // ".WHAT.lock", so that a folder can be locked once for each. Waits up to 2 s for another process that is
  // about to end. InvalidArgument with process, machine and since when, where somebody has it; FileError
  // where the file cannot be made.
  FolderLock(const std::string& folder, const std::string& what, InProcess own = InProcess::refuse);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // Before each write: InvalidArgument where another one of this process has taken over.
  void check() const;

 private:
  std::string folder_, what_, path_;
  int file_ = -1;
};

}  // namespace pacer
