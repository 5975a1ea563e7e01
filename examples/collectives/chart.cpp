// SVG as text. Colours keep apart for colour-blind readers (after Okabe and Ito) and follow light and dark.
#include "chart.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "support/svg.h"

namespace collectives {
namespace {

using namespace examples::svg;

constexpr double kWidth = 760, kLeft = 66, kTop = 62, kPlotHeight = 320;
constexpr double kRight = 560;  // names of lines stand beyond
constexpr size_t kColours = 8;

constexpr char kStyle[] =
    "<style>text{font:13px system-ui,sans-serif;fill:#3d4450}.title{font-size:16px;font-weight:600}"
    ".grid{stroke:#8b93a0;stroke-opacity:.25}.axis{stroke:#8b93a0}.dot{fill-opacity:0}.line{fill:none;stroke-"
    "width:2.2;"
    "stroke-linejoin:round}.dashed{stroke-dasharray:5 5;stroke:#8b93a0}.first{fill:#aab1bc}"
    ".c0{stroke:#8a6d00}.c1{stroke:#a8397f}.c2{stroke:#0072b2}.c3{stroke:#d55e00}.c4{stroke:#505a66}"
    ".c5{stroke:#007f5f}.c6{stroke:#6a4bc4}.c7{stroke:#7a3e1d}.second{fill:#d55e00}"
    "@media(prefers-color-scheme:dark){text{fill:#c9d0da}.c0{stroke:#e8c547}.c1{stroke:#e892c6}"
    ".c2{stroke:#56b4e9}.c3{stroke:#ff9249}.c4{stroke:#b4bcc8}.c5{stroke:#35c79c}.c6{stroke:#b3a0ff}.c7{"
    "stroke:#d9a27e}.second{fill:#ff9249}"
    ".first{fill:#5c6570}}</style>\n";

std::string titled(const std::string& title, double height, const std::string& content) {
  return picture(title, kWidth, height, kStyle + text_at("title", 0, 20, "start", title) + content);
}

// Powers of ten from `low` to `high`, widened by a twentieth, onto pixels.
struct LogScale {
  double low, high, from, to;
  double pixel(double value) const {
    const double share = (std::log10(value) - std::log10(low)) / (std::log10(high) - std::log10(low));
    return from + share * (to - from);
  }
};

LogScale scale_of(double low, double high, double from, double to) {
  constexpr double kMargin = 1.15;
  return {low / kMargin, std::max(high, low * 2) * kMargin, from, to};
}

std::string plain_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.7g", value);
  return text;
}

std::string power_of_ten(int exponent) {
  return exponent >= -2 && exponent <= 4 ? plain_number(std::pow(10, exponent))
                                         : "1e" + std::to_string(exponent);
}

// Pushes labels that would overlap apart, and all of them back by what they moved on average.
std::vector<double> spread_out(const std::vector<double>& wanted, double distance) {
  std::vector<size_t> order(wanted.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return wanted[a] < wanted[b]; });
  std::vector<double> placed(wanted);
  for (size_t i = 1; i < order.size(); ++i) {
    placed[order[i]] = std::max(placed[order[i]], placed[order[i - 1]] + distance);
  }
  double moved = 0;
  for (size_t i = 0; i < placed.size(); ++i)
    moved += (placed[i] - wanted[i]) / static_cast<double>(placed.size());
  for (double& y : placed) y -= moved;
  return placed;
}

}  // namespace

std::string line_chart(const std::string& title, const std::string& x_title, const std::string& y_title,
                       const std::vector<Line>& lines) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double left = kInfinity, right = 0, low = kInfinity, high = 0;
  for (const Line& line : lines) {
    for (const auto& [x, y] : line.points) {
      left = std::min(left, x);
      right = std::max(right, x);
      low = std::min(low, y);
      high = std::max(high, y);
    }
  }
  if (right == 0) return titled(title, kTop, "");
  const double bottom = kTop + kPlotHeight;
  const LogScale x_scale = scale_of(left, right, kLeft, kRight), y_scale = scale_of(low, high, bottom, kTop);

  std::string svg = text_at("", 0, 46, "start", y_title);
  // Powers of ten; where these are few, also 2 and 5 times them.
  const auto ticks = [](const LogScale& scale, auto&& draw) {
    const bool few = scale.high / scale.low < 100;
    for (int e = static_cast<int>(std::floor(std::log10(scale.low))); std::pow(10, e) <= scale.high; ++e) {
      for (const int digit : {1, 2, 5}) {
        const double value = digit * std::pow(10, e);
        if (value < scale.low || value > scale.high || (digit > 1 && !few)) continue;
        draw(value, digit == 1 ? power_of_ten(e) : plain_number(value));
      }
    }
  };
  ticks(y_scale, [&](double value, const std::string& label) {
    const double y = y_scale.pixel(value);
    svg += segment("grid", kLeft, y, kRight, y) + text_at("", kLeft - 8, y + 4, "end", label);
  });
  svg += segment("axis", kLeft, bottom, kRight, bottom);
  ticks(x_scale, [&](double value, const std::string& label) {
    const double x = x_scale.pixel(value);
    svg += segment("axis", x, bottom, x, bottom + 5) + text_at("", x, bottom + 20, "middle", label);
  });
  svg += text_at("", (kLeft + kRight) / 2, bottom + 42, "middle", x_title);

  std::vector<double> ends;
  for (const Line& line : lines)
    ends.push_back(line.points.empty() ? bottom : y_scale.pixel(line.points.back().second));
  const std::vector<double> labels = spread_out(ends, 17);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].points.empty()) continue;
    std::string points, dots;
    for (const auto& [x, y] : lines[i].points) {
      points += pixels(x_scale.pixel(x)) + "," + pixels(y_scale.pixel(y)) + " ";
      dots += dot("dot", x_scale.pixel(x), y_scale.pixel(y),
                  lines[i].name + " at " + plain_number(x) + ": " + plain_number(y));
    }
    points.pop_back();
    const std::string kind = lines[i].dashed ? "line dashed" : "line c" + std::to_string(i % kColours);
    svg += "<polyline class=\"" + kind + "\" points=\"" + points + "\"/>\n" + dots;
    const double x = x_scale.pixel(lines[i].points.back().first);
    svg += segment(kind, x + 4, ends[i], x + 16, labels[i]) +
           segment(kind, x + 16, labels[i], x + 26, labels[i]);
    svg += text_at("", x + 32, labels[i] + 4, "start", lines[i].name);
  }
  return titled(title, bottom + 54, svg);
}

std::string bar_chart(const std::string& title, const std::string& first_name, const std::string& second_name,
                      const std::vector<Bar>& bars) {
  constexpr double kNames = 190, kBarsEnd = 610, kRow = 32, kThickness = 20;
  double longest = 0;
  for (const Bar& bar : bars) longest = std::max(longest, bar.first + bar.second);
  const auto length = [&](double value) { return longest > 0 ? (kBarsEnd - kNames) * value / longest : 0; };
  std::string svg = rectangle("first", 0, 36, 12, 12) + text_at("", 18, 47, "start", first_name) +
                    rectangle("second", kBarsEnd / 2, 36, 12, 12) +
                    text_at("", kBarsEnd / 2 + 18, 47, "start", second_name);
  double top = kTop;
  for (const Bar& bar : bars) {
    svg += text_at("", kNames - 10, top + 15, "end", bar.name);
    svg += rectangle("first", kNames, top, length(bar.first), kThickness,
                     first_name + ": " + plain_number(bar.first));
    svg += rectangle("second", kNames + length(bar.first), top, length(bar.second), kThickness,
                     second_name + ": " + plain_number(bar.second));
    svg += text_at("", kNames + length(bar.first + bar.second) + 8, top + 15, "start", bar.label);
    top += kRow;
  }
  return titled(title, top, svg);
}

}  // namespace collectives
