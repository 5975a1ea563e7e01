// Distances between rows of a table and between ticks of a drawing that people like to read.
#pragma once

#include <cmath>
#include <initializer_list>

namespace examples {

// Returns the smallest of 1, 2, 5, 10, 20, 50 ... and their tenths, hundredths and so on of which at most `parts`
// fit into `range`, which is positive.
inline double round_interval(double range, double parts) {
  const double least = range / parts;
  const double power = std::pow(10, std::floor(std::log10(least)));
  for (const double digit : {1.0, 2.0, 5.0}) {
    // Quotients of round numbers are off by a bit.
    if (digit * power >= least * (1 - 1e-9)) return digit * power;
  }
  return 10 * power;
}

}  // namespace examples
