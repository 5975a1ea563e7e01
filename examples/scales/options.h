// What the program can be told on the command line, and the errors for what it cannot.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace scales {

enum class Optimizer { adamw, onebit_adam, lamb, onebit_lamb };
// What shares one scale; none: momentum is averaged in full precision, only the variance is frozen.
enum class ScaleUnit { buffer, tensor, block, none };

struct Options {
  std::string model = "gru";  // one of model_names()
  Optimizer optimizer = Optimizer::onebit_adam;
  ScaleUnit unit = ScaleUnit::buffer;
  bool textbook = false;  // restated in textbook.h, whatever the unit
  bool compare = false;   // train the textbook's and pacer's, and say how far apart they are
  uint64_t seed = 1;
  int ranks = 2;
  int64_t steps = 300, freeze = 60;
  double learning_rate = 2e-3;
  bool cosine = true;  // after a rise over a tenth of the steps the rate falls to zero; else it stays
  std::string data;    // empty: the text of LibTorch's headers
  int threads = 1;     // of each rank's own work
};

// Nothing where help was asked for and printed. Throws pacer::InvalidArgument with one sentence.
std::optional<Options> read_options(int argument_count, char** arguments);

// The choices in short, as they were typed: "--model gru --optimizer onebit-adam ...".
std::string describe(const Options& options);

}  // namespace scales
