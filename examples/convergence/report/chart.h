// Line and bar charts as SVG text. Pure functions of plain data; colours and fonts come from the style sheet
// of the page around them (report_style.h), so one picture serves light and dark.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace convergence {

struct ChartPoint {
  double x;
  double y;
  double spread = 0.0;  // half the height of the shaded band at this point; 0 for none
};

struct ChartLine {
  std::string name;
  size_t colour = 0;   // number of the arm; also chooses the dash pattern
  bool faint = false;  // one seed among several: thin, without values on hover
  bool markers = false;
  std::vector<ChartPoint> points;
};

// What an axis counts; decides where its ticks are and how they are written.
enum class Axis { tokens, time, loss, difference, plain };

struct Chart {
  std::string title;
  Axis x = Axis::tokens;
  Axis y =
      Axis::loss;  // loss is drawn on a logarithmic scale, which shows the start and the end of a run at once
  std::vector<ChartLine> lines;
  std::string band_meaning;  // for the legend; empty where no line has a band
};

struct Bar {
  std::string name;
  size_t colour = 0;
  double value = 0.0;  // seconds
  std::string label;
};

// A <figure> with title, legend and picture; `x` in tokens or seconds, `y` in nats or, on a plain axis, in
// what the title says.
std::string line_chart(const Chart& chart);

// A <figure> with one horizontal bar per entry.
std::string bar_chart(const std::string& title, const std::vector<Bar>& bars);

}  // namespace convergence
