// The three things that pacer-collectives does with the schemes: check them against each other, measure the
// exchange alone for several sizes, and measure training steps. All ranks call them alike.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>

#include "clock.h"
#include "workload.h"

namespace collectives {

// Runs all schemes on the same random gradients. Throws pacer::Error, on every rank, where a sum is further
// from the exact one than any order of additions can be, gamma(W-1) * sum |x| with gamma(k) = k u / (1 - k u)
// and u = 2^-24 (Higham 2002, section 4.2), or where ranks differ in a bit.
void check_schemes(const std::shared_ptr<pacer::Communicator>& world, const ExchangeSize& size);

struct Measured {
  std::string scheme;
  Timing timing;
};

// Gradients that are all there already: the first five schemes, and "buckets", which is the sixth without a
// backward to overlap with: its buckets are on their way at the same time.
std::vector<Measured> measure_exchange(const std::shared_ptr<pacer::Communicator>& world,
                                       const ExchangeSize& size, const Patience& patience);

struct StepSettings {
  int64_t layers = 12;
  int64_t width = 512;
  double layer_seconds = 0;  // see ResidualMlpImpl
  int64_t rows = 0;  // of a rank's batch; 0: so many that backward takes about as long as one exchange, or
                     // 8 where layers sleep
};

struct StepResults {
  int64_t rows = 0;
  int64_t elements = 0;  // of the model
  int64_t tensors = 0;
  int64_t buckets = 0;
  int64_t buckets_early = 0;           // sent while backward ran, in the last step
  std::vector<Measured> measurements;  // first "no exchange": forward and backward alone
};

// Forward, backward and exchange, without an optimizer, which would be the same for all.
StepResults measure_step(const std::shared_ptr<pacer::Communicator>& world, const StepSettings& settings,
                         const Patience& patience);

}  // namespace collectives
