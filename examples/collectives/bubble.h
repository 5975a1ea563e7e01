// The bubble of a pipeline: how long ranks stand idle in a step, and how many micro-batches they hold, over
// the number of micro-batches. GPipe and 1F1B, simulated pass by pass, beside their formulas, with messages
// that take no time and with messages that do. Nothing is computed or sent here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace collectives {

struct BubbleSettings {
  int64_t stages = 4;    // >= 2, each of a rank of its own
  double message = 0.1;  // time of one, in units of a forward pass through a stage; backward takes two
};

struct BubblePoint {
  int64_t micro_batches = 0;
  double idle = 0;           // share of a step, of each rank, where messages take no time
  double formula = 0;        // of that share
  double idle_messages = 0;  // the share where messages take `message`
  double alive = 0;          // most micro-batches at once, of rank 0
  double alive_formula = 0;
};

struct Bubble {
  std::string schedule;
  std::vector<BubblePoint> points;  // 1, 2, 4 ... 64 micro-batches
};

// Of GPipe and 1F1B, in this order.
std::vector<Bubble> simulate_bubbles(const BubbleSettings& settings);

}  // namespace collectives
