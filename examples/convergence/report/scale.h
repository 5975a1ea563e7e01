// From data to pixels: the range of an axis, its ticks and their labels.
#pragma once

#include <string>
#include <vector>

#include "chart.h"

namespace convergence {

struct Tick {
  double value;
  std::string label;
};

class Scale {
 public:
  // An axis over [low, high] of the data, drawn from pixel `from` to pixel `to`. Non-finite bounds are
  // tolerated.
  Scale(Axis axis, double low, double high, double from, double to);

  double pixel(double value) const;
  const std::vector<Tick>& ticks() const { return ticks_; }
  std::string title() const;                    // "tokens", "training time, minutes", ...
  std::string exact_label(double value) const;  // for hover: more digits than a tick

 private:
  double position(double value) const;  // where ticks are even: logarithm for losses

  Axis axis_;
  double unit_ = 1.0;  // seconds per shown unit on a time axis
  double low_, high_, from_, to_;
  std::vector<Tick> ticks_;
};

}  // namespace convergence
