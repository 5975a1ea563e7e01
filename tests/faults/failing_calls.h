// Calls of the operating system that fail: the n-th one for a file below a folder that the first thread
// beside the main one makes. This program's own open, write and so on stand before the system's, so that the
// real code over the real disk is tested. What C's streams write inside the C library is not seen.
#pragma once

#include <cstdint>
#include <string>

namespace pacer::testing {

struct CallFault {
  int error = 0;       // errno; 0: half of what was to be written, or everything where it is no write
  bool stays = false;  // every later call that takes space fails, too: a full disk
};

// While it lives, the n-th call fails. One at a time.
class FailingCalls {
 public:
  FailingCalls(std::string folder, int64_t nth, CallFault fault);
  ~FailingCalls();
  FailingCalls(const FailingCalls&) = delete;

  // Whether the call to fail was reached.
  bool has_failed() const;
};

}  // namespace pacer::testing
