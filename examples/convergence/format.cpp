#include "format.h"

#include <algorithm>
#include <cmath>

namespace convergence {

std::string count_of(int64_t count, const std::string& what, const std::string& ending) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : ending);
}

std::string signed_fixed(double value, int decimals) {
  std::string text = fixed_text(std::fabs(value), decimals);
  if (text.find_first_of("123456789") == std::string::npos && std::isfinite(value)) return text;
  return (value < 0 ? "-" : "+") + text;
}

std::string significant(double value, int digits) {
  if (value == 0.0 || !std::isfinite(value)) return fixed_text(value, 0);
  const int magnitude = static_cast<int>(std::floor(std::log10(std::fabs(value))));
  return fixed_text(value, std::max(0, digits - 1 - magnitude));
}

size_t shown_width(const std::string& text) {
  size_t width = 0;
  for (const char c : text) width += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
  return width;
}

}  // namespace convergence
