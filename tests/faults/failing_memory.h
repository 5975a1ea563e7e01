// Host memory that runs out: the n-th allocation of one call fails. Counted are tensors (LibTorch's CPU
// allocator, whoever asks it) and operator new where pacer's own code asks, standard library included. What
// LibTorch's code asks operator new for is not: destructors of its graphs ask too, and end the program if
// they get nothing. Memory that C code takes with malloc is not counted either.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <new>
#include <string>

#include <c10/util/Exception.h>

#include <pacer/core/error.h>

namespace pacer::testing {

enum class Shortage {
  once,           // the n-th allocation alone
  from_there_on,  // all from the n-th on, until the call ends
};

// While it lives, allocations of the thread that made it may fail. One at a time in each thread.
class FailingMemory {
 public:
  FailingMemory(int64_t nth, Shortage shortage);
  ~FailingMemory();
  FailingMemory(const FailingMemory&) = delete;

  // Of this thread's last scope: how many it counted, up to the failure.
  static int64_t counted();
  // Of the whole process: tensors and memory of operator new that are not given back yet.
  static int64_t live();
};

struct Attempt {
  bool failed = false;   // it threw
  bool is_typed = true;  // std::bad_alloc, LibTorch's error or pacer's
  bool reached = false;  // there was an n-th allocation
  std::string message;
};

// One call whose n-th allocation fails.
inline Attempt attempt(int64_t nth, Shortage shortage, const std::function<void()>& call) {
  Attempt result;
  try {
    const FailingMemory scope(nth, shortage);
    call();
  } catch (const std::bad_alloc&) {
    result.failed = true;
    result.message = "std::bad_alloc";
  } catch (const std::exception& error) {
    result.failed = true;
    result.is_typed = dynamic_cast<const Error*>(&error) || dynamic_cast<const c10::Error*>(&error);
    result.message = error.what();
  }
  result.reached = FailingMemory::counted() >= nth;
  return result;
}

// The next n: each with PACER_TEST_LONG=1, else each of the first ones and ever fewer of the others.
int64_t next_allocation(int64_t nth);

}  // namespace pacer::testing
