// Two kinds of charts as SVG files that stand alone: lines on logarithmic scales, and bars of two parts. The
// study's charts live inside its report's page and have no logarithmic x axis.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace collectives {

struct Line {
  std::string name;
  bool dashed = false;                            // a bound, no measurement
  std::vector<std::pair<double, double>> points;  // x and y > 0, x rising
};

// Names stand at the lines' right ends. Empty lines are left out.
std::string line_chart(const std::string& title, const std::string& x_title, const std::string& y_title,
                       const std::vector<Line>& lines);

struct Bar {
  std::string name;
  double first;   // >= 0, drawn in grey
  double second;  // >= 0, drawn in colour behind it
  std::string label;
};

// `first_name` and `second_name` say what the parts are.
std::string bar_chart(const std::string& title, const std::string& first_name, const std::string& second_name,
                      const std::vector<Bar>& bars);

}  // namespace collectives
