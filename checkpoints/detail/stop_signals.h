// SIGTERM and SIGINT as a wish to stop: the first one is remembered, and from then on both do again what they
// do by themselves, so that a second one ends the process at once.
#pragma once

namespace pacer::detail {

// Takes both signals while any of these lives, in any thread; then puts back what was there before.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Whether one has come since the first of those that live was made.
  static bool requested();
};

}  // namespace pacer::detail
