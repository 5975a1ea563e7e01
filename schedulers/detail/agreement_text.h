// What hooks say of themselves when ranks compare them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include <pacer/core/error.h>
#include <pacer/files/checksum.h>
#include <pacer/hooks/progress.h>

namespace pacer::detail {

// A function of progress that nobody can look into: its values at powers of two, in words, and a checksum of
// its values at steps 0 to 4096 and, from there to 2^40, at steps that grow by a hundredth each, with 1,000
// tokens a step.
template <class F>
std::string sampled(const F& f) {
  const auto value_at = [&](int64_t step) {
    Progress progress;
    progress.step = step;
    progress.tokens = 1000 * step;
    return concatenate(f(progress));
  };
  constexpr int64_t kLast = int64_t{1} << 40, kEach = 4096;
  std::string text, last;
  for (int64_t step = 0; step <= kLast; step = step == 0 ? 1 : 2 * step) {
    const std::string value = value_at(step);
    if (value != last) text += concatenate(last.empty() ? "" : ", ", value, " from step ", step);
    last = value;
  }
  Checksum all;
  for (int64_t step = 0; step <= kLast; step += std::max<int64_t>(1, step < kEach ? 1 : step / 100)) {
    const std::string value = value_at(step) + ' ';
    all.add(value.data(), value.size());
  }
  return text + ", checksum " + all.hex();
}

}  // namespace pacer::detail
