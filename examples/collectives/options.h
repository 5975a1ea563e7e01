// What pacer-collectives can be told on the command line, and the errors for what it cannot.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bubble.h"
#include "clock.h"
#include "workload.h"

namespace collectives {

struct Options {
  int processes = 0;     // 0: those a launcher started, else 4
  bool threads = false;  // ranks are threads of this process
  bool cuda = false;
  bool exchange = true, step = true, bubble = true;  // what to measure
  double rate = 0;  // bits per second of a rank's link, each way; 0: not known
  std::string output = "run/collectives";
  int64_t layers = 12, width = 512, rows = 0;  // of the training step; see StepSettings
  double layer_seconds = 0;
  BubbleSettings pipeline;
  std::vector<ExchangeSize> sizes;
  Patience exchange_patience{}, step_patience{};
};

// Nothing where help was asked for and printed. Throws pacer::InvalidArgument with one sentence.
std::optional<Options> read_options(int argument_count, char** arguments);

}  // namespace collectives
