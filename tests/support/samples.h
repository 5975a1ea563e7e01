// Test data that is the same on every machine: a small generator of its own, because the distributions of
// <random> differ between standard libraries. And the switches by which a run asks for more or for less.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace pacer::testing {

// PACER_TEST_LONG=1: everything instead of a sample.
// PACER_TEST_SMALL=1: small sizes, for tools that slow a GPU down.
inline bool is_switched_on(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}
inline bool wants_long_tests() { return is_switched_on("PACER_TEST_LONG"); }
inline bool wants_small_tests() { return is_switched_on("PACER_TEST_SMALL"); }

// Of things that take turns, every n-th, from the one of that place on; with PACER_TEST_LONG=1 all.
class Turns {
 public:
  explicit Turns(int n, int first = 0) : n_(n), turn_(n - first) {}
  bool is_next() { return turn_++ % n_ == 0 || wants_long_tests(); }

 private:
  int n_, turn_;
};

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
class Samples {
 public:
  explicit Samples(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // In [0, end).
  int64_t below(int64_t end) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(end)); }
  // In [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  bool chance(double probability) { return uniform() < probability; }
  // In [low, high), evenly spread over the logarithm; both positive.
  double log_uniform(double low, double high) {
    return std::exp(std::log(low) + uniform() * (std::log(high) - std::log(low)));
  }
  double sign() { return chance(0.5) ? 1.0 : -1.0; }

  template <class Value, size_t n>
  Value one_of(const Value (&values)[n]) {
    return values[below(n)];
  }

 private:
  uint64_t state_;
};

}  // namespace pacer::testing
