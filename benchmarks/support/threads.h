// Plain threads for what is measured beside the optimizers; starting them costs microseconds, the work
// milliseconds.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace bench {

// Calls run(begin, end) for `threads` even parts of [0, count), one on each thread.
template <class Run>
void run_parts(int threads, int64_t count, const Run& run) {
  const auto bound = [&](int part) { return count * part / threads; };
  std::vector<std::thread> others;
  for (int part = 1; part < threads; ++part) {
    others.emplace_back([&run, begin = bound(part), end = bound(part + 1)] { run(begin, end); });
  }
  run(bound(0), bound(1));
  for (auto& thread : others) thread.join();
}

}  // namespace bench
