// Which buckets of a 1-bit optimizer have left.
#pragma once

#include <cstdint>

#include <pacer/collectives/communicator.h>

namespace pacer::testing {

// How many exchanges of momentum this rank has started in the lane of buckets.
inline int64_t sent_there(const Communicator& world) {
  int64_t calls = 0;
  for (const Traffic& traffic : world.traffic()) {
    if (traffic.group == "lane momentum there") calls += traffic.calls;
  }
  return calls;
}

}  // namespace pacer::testing
