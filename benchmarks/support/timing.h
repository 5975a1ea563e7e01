// Clocks and repetition on the host. Time on a GPU is in gpu_time.h.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <functional>
#include <thread>
#include <vector>

namespace bench {

// Order statistics of repeated measurements. Medians, because other users of a machine only ever make things
// slower.
struct Spread {
  double median = 0;
  double min = 0;
  double max = 0;
  int64_t count = 0;
};

// All zero for an empty list.
inline Spread spread_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  const double median = values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {median, values.front(), values.back(), static_cast<int64_t>(values.size())};
}

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  double milliseconds() const { return seconds() * 1e3; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

// Time this thread had the processor. On a machine that others use, it tells what the code costs.
class ProcessorStopwatch {
 public:
  double milliseconds() const { return now() - start_; }

 private:
  static double now() {
    std::timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
  }
  double start_ = now();
};

// `repetitions` measurements, but once `seconds` have passed no more than `at_least`.
struct Patience {
  int64_t repetitions;
  int64_t at_least;
  double seconds;

  bool lasts(int64_t done, const Stopwatch& since) const {
    return done < repetitions && (done < at_least || since.seconds() < seconds);
  }
};

// `sample` returns one measurement in milliseconds.
template <class Sample>
Spread repeat(const Patience& patience, Sample&& sample) {
  std::vector<double> values;
  const Stopwatch since;
  while (patience.lasts(static_cast<int64_t>(values.size()), since)) values.push_back(sample());
  return spread_of(values);
}

// OpenMP's threads go on spinning for some milliseconds after their work and would slow the next contender.
constexpr std::chrono::milliseconds kSettling(10);

struct Interleaved {
  Spread wall;
  Spread processor;  // of the calling thread
};

// Runs all works in turn, again and again, and returns the milliseconds of each: a neighbour that slows the
// machine for a while slows all of them, and ratios stay fair.
inline std::vector<Interleaved> interleave(const std::vector<std::function<void()>>& works,
                                           const Patience& patience) {
  std::vector<std::vector<double>> wall(works.size());
  std::vector<std::vector<double>> processor(works.size());
  const Stopwatch since;
  for (int64_t round = 0; patience.lasts(round, since); ++round) {
    for (size_t i = 0; i < works.size(); ++i) {
      std::this_thread::sleep_for(kSettling);
      const Stopwatch watch;
      const ProcessorStopwatch processor_watch;
      works[i]();
      processor[i].push_back(processor_watch.milliseconds());
      wall[i].push_back(watch.milliseconds());
    }
  }
  std::vector<Interleaved> spreads;
  for (size_t i = 0; i < works.size(); ++i) spreads.push_back({spread_of(wall[i]), spread_of(processor[i])});
  return spreads;
}

}  // namespace bench
