// What hooks say of themselves when ranks compare them: a function of progress as its values at sampled
// points.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include <pacer/schedulers/progress.h>

namespace pacer::detail {

// f(progress) at steps 0, 1, 2, 4, ... 2^40, with 1,000 tokens a step; equal neighbours are written once.
template <class F>
std::string sampled(const F& f) {
  std::ostringstream text;
  text.precision(17);
  std::string last;
  for (int64_t step = 0; step <= (int64_t{1} << 40); step = step == 0 ? 1 : 2 * step) {
    Progress progress;
    progress.step = step;
    progress.tokens = 1000 * step;
    std::ostringstream value;
    value.precision(17);
    value << f(progress);
    if (value.str() != last) text << (last.empty() ? "" : ", ") << value.str() << " from step " << step;
    last = value.str();
  }
  return text.str();
}

}  // namespace pacer::detail
