// The numbers of a case.
#pragma once

#include <string>
#include <vector>

#include "cases.h"
#include "support/timing.h"

namespace bench::kernels {

// Bytes read plus written per second by the fastest ways to move memory, taken beside a timing and in the
// same kind of time. Zero: not measured.
struct Ceiling {
  double copy = 0;
  double update = 0;  // in place
};

// One number of a contender. Kinds:
//   wall       CPU; what a user waits
//   processor  CPU, one thread; without the time in which other programs had the processor
//   device     GPU; what the device works
//   called     GPU; wall clock per step of a loop
//   host       GPU; what the call costs the host. Has no ceiling, for it moves no memory to speak of.
struct Timing {
  std::string kind;
  std::string method;
  Spread milliseconds;
  Ceiling ceiling;
};

struct Measurement {
  std::string contender;
  std::string meaning;
  std::vector<Timing> timings;

  const Timing* find(const std::string& kind) const;
};

struct CaseResult {
  Case which;
  int threads = 0;  // CPU only
  std::vector<Measurement> measurements;

  const Measurement* find(const std::string& contender) const;
  // pacer's; null where it failed.
  const Measurement* own() const;
  // The least a step can move, over the time.
  double bytes_per_second(const Timing& timing) const;
};

// One work on one device as a table: a row for each kind of time and model, a column for each contender.
std::string table_of(const std::vector<const CaseResult*>& results);

}  // namespace bench::kernels
