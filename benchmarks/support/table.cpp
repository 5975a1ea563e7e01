#include "table.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace bench {
namespace {

void print_line(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

}  // namespace

std::string aligned(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      if (i > 0) line += "  ";
      line += i == 0 ? row[i] + padding : padding + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

void print_head(const std::vector<std::string>& names) {
  std::vector<std::string> cells, rules;
  for (const std::string& name : names) {
    const bool is_right = !name.empty() && name.back() == ':';
    cells.push_back(is_right ? name.substr(0, name.size() - 1) : name);
    rules.push_back(is_right ? "---:" : "---");
  }
  print_row(cells);
  print_row(rules);
}

void print_row(const std::vector<std::string>& cells) {
  std::string line = "|";
  for (const std::string& cell : cells) line += (cell.empty() ? "" : " ") + cell + " |";
  print_line(line);
}

void print(const pacer::JsonLine& line) { print_line(line.str()); }

std::string format(const char* pattern, ...) {
  char text[256];
  va_list values;
  va_start(values, pattern);
  std::vsnprintf(text, sizeof text, pattern, values);
  va_end(values);
  return text;
}

std::string milliseconds_text(double milliseconds) {
  const int decimals = milliseconds < 1 ? 4 : milliseconds < 10 ? 3 : milliseconds < 100 ? 2 : 1;
  return format("%.*f", decimals, milliseconds);
}

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

}  // namespace bench
