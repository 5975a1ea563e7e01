// Memory that runs out: the n-th allocation of one call fails. Which memory that is, the program decides that
// defines prepare_failing_memory(): tests/faults/failing_memory.cpp for the host,
// tests/device/failing_memory.cpp for a GPU.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <new>
#include <string>

#include <c10/util/Exception.h>

#include <pacer/core/error.h>

#include "support/samples.h"

namespace pacer::testing {

enum class Shortage {
  once,           // the n-th allocation alone
  from_there_on,  // all from the n-th on, until the call ends
};

// Puts an allocator in place that asks FailingMemory::fails_now(), and sets up whatever that needs.
void prepare_failing_memory();
// Of the whole process: such allocations that are not given back yet.
int64_t live_allocations();

// While it lives, allocations of the thread that made it may fail. One at a time in each thread.
class FailingMemory {
 public:
  FailingMemory(int64_t nth, Shortage shortage) {
    prepare_failing_memory();
    nth_ = nth;
    shortage_ = shortage;
    count_ = 0;
    is_armed_ = true;
  }
  ~FailingMemory() { is_armed_ = false; }
  FailingMemory(const FailingMemory&) = delete;

  static bool is_armed() { return is_armed_; }
  // Counts an allocation of this thread, and says whether it fails.
  static bool fails_now() {
    if (!is_armed_) return false;
    ++count_;
    return count_ == nth_ || (count_ > nth_ && shortage_ == Shortage::from_there_on);
  }
  // Of this thread's last scope: how many it counted, up to the failure.
  static int64_t counted() { return count_; }

 private:
  static inline thread_local bool is_armed_ = false;
  static inline thread_local int64_t nth_ = 0, count_ = 0;
  static inline thread_local Shortage shortage_ = Shortage::once;
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
inline int64_t next_allocation(int64_t nth) { return nth + (wants_long_tests() ? 1 : 1 + nth / 8); }

// Each n that is chosen, both ways. `trial` returns whether there was an n-th allocation.
inline void for_all_allocations(const std::function<bool(int64_t nth, Shortage shortage)>& trial) {
  for (const Shortage shortage : {Shortage::once, Shortage::from_there_on}) {
    for (int64_t nth = 1; trial(nth, shortage); nth = next_allocation(nth)) {
    }
  }
}

}  // namespace pacer::testing
