// SVG out of lines and bars. Every number is written in fixed notation, every text is escaped.
#include "chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "convergence/format.h"
#include "scale.h"
#include "support/svg.h"

namespace convergence {
namespace {

using namespace examples::svg;

// The picture in its own units; the page scales it.
constexpr double kWidth = 600.0, kHeight = 340.0;
constexpr double kLeft = 76.0, kRight = 584.0, kTop = 32.0, kBottom = 290.0;
constexpr size_t kColours = 6;  // in the style sheet

std::string series_class(size_t colour) { return "series-" + std::to_string(colour % kColours); }

struct Scales {
  Scale x, y;
};

Scales scales_of(const Chart& chart) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double left = 0.0, right = -kInfinity, low = kInfinity, high = -kInfinity;
  for (const ChartLine& line : chart.lines) {
    for (const ChartPoint& point : line.points) {
      right = std::max(right, point.x);
      low = std::min(low, point.y - point.spread);
      high = std::max(high, point.y + point.spread);
    }
  }
  return {Scale(chart.x, left, right, kLeft, kRight), Scale(chart.y, low, high, kBottom, kTop)};
}

std::string draw_axes(const Scales& scales, bool zero_line) {
  std::string svg;
  for (const Tick& tick : scales.y.ticks()) {
    const double y = scales.y.pixel(tick.value);
    svg += segment(zero_line && tick.value == 0.0 ? "zero" : "grid", kLeft, y, kRight, y);
    svg += text_at("", kLeft - 8.0, y + 4.0, "end", tick.label);
  }
  svg += segment("axis", kLeft, kBottom, kRight, kBottom);
  for (const Tick& tick : scales.x.ticks()) {
    const double x = scales.x.pixel(tick.value);
    svg += segment("axis", x, kBottom, x, kBottom + 5.0);
    svg += text_at("", x, kBottom + 20.0, "middle", tick.label);
  }
  svg += text_at("", (kLeft + kRight) / 2.0, kBottom + 42.0, "middle", scales.x.title());
  svg += text_at("", 0.0, 12.0, "start", scales.y.title());
  return svg;
}

std::string draw_band(const ChartLine& line, const Scales& scales) {
  const bool any =
      std::any_of(line.points.begin(), line.points.end(), [](auto& point) { return point.spread > 0.0; });
  if (!any) return {};
  std::string upper, lower;
  for (const ChartPoint& point : line.points) {
    const std::string x = pixels(scales.x.pixel(point.x)) + ",";
    upper += x + pixels(scales.y.pixel(point.y + point.spread)) + " ";
    lower = x + pixels(scales.y.pixel(point.y - point.spread)) + " " + lower;
  }
  return "<polygon" + attribute("class", "band " + series_class(line.colour)) +
         attribute("points", upper + lower) + "/>\n";
}

// The line, its markers, and for the page's script each point as "x|y|label of x|label of y".
std::string draw_line(const ChartLine& line, const Scales& scales) {
  std::string points, values, markers;
  for (const ChartPoint& point : line.points) {
    const std::string x = pixels(scales.x.pixel(point.x)), y = pixels(scales.y.pixel(point.y));
    const std::string x_label = scales.x.exact_label(point.x), y_label = scales.y.exact_label(point.y);
    points += x + "," + y + " ";
    values += (values.empty() ? "" : ";") + x + "|" + y + "|" + x_label + "|" + y_label;
    if (line.markers) {
      markers += dot("", scales.x.pixel(point.x), scales.y.pixel(point.y),
                     line.name + " at " + x_label + ": " + y_label);
    }
  }
  const std::string kind = (line.faint ? "faint " : "line ") + series_class(line.colour);
  std::string group = "<g" + attribute("class", kind);
  if (!line.faint) group += attribute("data-name", line.name) + attribute("data-points", values);
  return group + "><polyline" + attribute("points", points) + "/>\n" + markers + "</g>\n";
}

std::string draw_legend(const Chart& chart) {
  std::string legend;
  if (!chart.band_meaning.empty()) {
    legend += "<span class=\"key\"><span class=\"shade\"></span>" + escape(chart.band_meaning) + "</span>";
  }
  for (const ChartLine& line : chart.lines) {
    if (line.faint) continue;
    legend += "<span class=\"key\"><svg class=\"sample\" viewBox=\"0 0 34 10\" aria-hidden=\"true\"><g" +
              attribute("class", "line " + series_class(line.colour)) +
              "><polyline points=\"2,5 32,5\"/></g></svg>" + escape(line.name) + "</span>";
  }
  return legend;
}

std::string figure(const std::string& title, const std::string& legend, double height,
                   const std::string& content) {
  return "<figure>\n<figcaption><b>" + escape(title) + "</b><span class=\"legend\">" + legend +
         "</span></figcaption>\n<svg class=\"chart\" viewBox=\"0 0 " + pixels(kWidth) + " " + pixels(height) +
         "\" role=\"img\"" + attribute("aria-label", title) + ">\n" + content + "</svg>\n</figure>\n";
}

}  // namespace

std::string line_chart(const Chart& chart) {
  const Scales scales = scales_of(chart);
  std::string svg = draw_axes(scales, chart.y == Axis::difference);
  for (const ChartLine& line : chart.lines) svg += draw_band(line, scales);
  for (const bool faint : {true, false}) {
    for (const ChartLine& line : chart.lines) {
      if (line.faint == faint) svg += draw_line(line, scales);
    }
  }
  return figure(chart.title, draw_legend(chart), kHeight, svg);
}

std::string bar_chart(const std::string& title, const std::vector<Bar>& bars) {
  constexpr double kRow = 56.0, kThickness = 20.0, kLabelSpace = 270.0;
  double longest = 0.0;
  for (const Bar& bar : bars) longest = std::max(longest, bar.value);
  std::string svg;
  double top = 8.0;
  for (const Bar& bar : bars) {
    const double length = longest > 0.0 ? (kRight - kLabelSpace) * bar.value / longest : 0.0;
    svg += text_at("", 0.0, top + 12.0, "start", bar.name);
    svg += rectangle("bar " + series_class(bar.colour), 0.0, top + 20.0, std::max(1.0, length), kThickness,
                     bar.name + ": " + bar.label);
    svg += text_at("", length + 8.0, top + 35.0, "start", bar.label);
    top += kRow;
  }
  return figure(title, "", top, svg);
}

}  // namespace convergence
