// The CPU kernels of a compressed step over GPT-2's tensors, as OneBitAdam and OneBitLamb call them on two
// ranks, without what lies between them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/streams.h"

namespace bench::cpu {

struct Part {
  std::string name;
  Mix mix;       // the loop that it is held against
  double bytes;  // each stream once, of all elements
  std::function<void(int threads)> run;
};

// Their memory lives as long as the parts do.
std::vector<Part> make_parts();

}  // namespace bench::cpu
