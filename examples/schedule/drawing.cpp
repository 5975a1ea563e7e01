// SVG as text. Colours keep apart for colour-blind readers (after Okabe and Ito) and follow light and dark.
#include <algorithm>
#include <cmath>

#include <pacer/files/number_text.h>

#include "report.h"
#include "support/round_numbers.h"
#include "support/svg.h"

namespace schedule {
namespace {

using namespace examples::svg;

constexpr double kWidth = 760, kLeft = 74, kRight = 740, kTop = 24, kPlotHeight = 120, kPanelHeight = 176;

constexpr char kStyle[] =
    "<style>text{font:13px system-ui,sans-serif;fill:#3d4450}.title{font-weight:600}"
    ".grid{stroke:#8b93a0;stroke-opacity:.25}.axis{stroke:#8b93a0}.dot{fill:#0072b2}"
    ".line{fill:none;stroke:#0072b2;stroke-width:2.2;stroke-linejoin:round}"
    "@media(prefers-color-scheme:dark){text{fill:#c9d0da}.dot{fill:#56b4e9}.line{stroke:#56b4e9}}</style>\n";

// Calls draw(value, label) for the round numbers from 0 to `most`.
template <class Draw>
void ticks(double most, int parts, const Draw& draw) {
  const double apart = examples::round_interval(most, parts);
  for (int i = 0; i * apart <= most * (1 + 1e-9); ++i) {
    const double value = i * apart;
    draw(value, value < 1'000 ? pacer::short_text(value, 6) : pacer::short_count(value));
  }
}

std::string panel(const Column& x, const Column& column, const Course& course, double top) {
  const double bottom = top + kPlotHeight;
  const double last = std::max(1.0, x.value(course.points.back()));
  double most = 0;
  for (const Row& row : course.points) most = std::max(most, column.value(row));
  if (most == 0) most = 1;
  const auto x_of = [&](const Row& row) { return kLeft + (kRight - kLeft) * x.value(row) / last; };
  const auto y_of = [&](double value) { return bottom - kPlotHeight * value / most; };
  std::string svg = text_at("title", kLeft, top - 10, "start", column.about), points;
  ticks(most, 4, [&](double value, const std::string& label) {
    svg += segment("grid", kLeft, y_of(value), kRight, y_of(value)) +
           text_at("", kLeft - 8, y_of(value) + 4, "end", label);
  });
  svg += segment("axis", kLeft, bottom, kRight, bottom);
  ticks(last, 8, [&](double value, const std::string& label) {
    const double at = kLeft + (kRight - kLeft) * value / last;
    svg += segment("axis", at, bottom, at, bottom + 5) + text_at("", at, bottom + 20, "middle", label);
  });
  for (const Row& row : course.points) {
    points += (points.empty() ? "" : " ") + pixels(x_of(row)) + "," + pixels(y_of(column.value(row)));
  }
  svg += "<polyline" + attribute("class", "line") + attribute("points", points) + "/>\n";
  for (const Row& row : course.table) {
    svg += dot("dot", x_of(row), y_of(column.value(row)),
               column.text(column.value(row)) + " at " + x.title + " " + x.text(x.value(row)));
  }
  return svg;
}

}  // namespace

std::string drawing(const std::vector<Column>& columns, const Course& course, const std::string& x) {
  const auto is_axis = [&](const Column& column) { return column.title == x; };
  const Column axis = *std::find_if(columns.begin(), columns.end(), is_axis);
  std::string svg = kStyle;
  double top = kTop;
  for (const Column& column : columns) {
    if (is_axis(column)) continue;
    svg += panel(axis, column, course, top);
    top += kPanelHeight;
  }
  svg += text_at("", (kLeft + kRight) / 2, top - 8, "middle", x);
  return picture("What the schedules of a run do", kWidth, top, svg);
}

}  // namespace schedule
