// Number formatting on top of support/number_text.h.
#include "format.h"

#include <array>
#include <cmath>

#include "support/number_text.h"

namespace convergence {

std::string fixed(double value, int decimals) {
  if (std::isnan(value)) return "nan";  // also with a sign
  return examples::fixed_text(value, decimals);
}

std::string signed_fixed(double value, int decimals) {
  std::string text = fixed(std::fabs(value), decimals);
  if (text.find_first_of("123456789") == std::string::npos && std::isfinite(value)) return text;
  return (value < 0 ? "-" : "+") + text;
}

std::string significant(double value, int digits) {
  if (value == 0.0 || !std::isfinite(value)) return fixed(value, 0);
  const int magnitude = static_cast<int>(std::floor(std::log10(std::fabs(value))));
  return fixed(value, std::max(0, digits - 1 - magnitude));
}

std::string with_thousands(int64_t value) {
  std::string text = std::to_string(value);
  const size_t first = value < 0 ? 1 : 0;
  for (size_t at = text.size(); at > first + 3;) text.insert(at -= 3, 1, ',');
  return text;
}

std::string short_count(double value) {
  constexpr std::array<const char*, 5> kSuffixes = {"", "k", "M", "G", "T"};
  size_t suffix = 0;
  while (std::fabs(value) >= 999.5 && suffix + 1 < kSuffixes.size()) {
    value /= 1000.0;
    ++suffix;
  }
  std::string text = fixed(value, std::fabs(value) < 9.995 ? 2 : std::fabs(value) < 99.95 ? 1 : 0);
  if (text.find('.') != std::string::npos) {
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
  }
  return text + kSuffixes[suffix];
}

std::string duration(double seconds) {
  if (!(seconds >= 0.0) || std::isinf(seconds)) return "unknown";
  if (seconds < 59.95) return fixed(seconds, 1) + " s";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  const auto two_digits = [](int64_t value) { return (value < 10 ? "0" : "") + std::to_string(value); };
  if (whole < 3600) return std::to_string(whole / 60) + " min " + two_digits(whole % 60) + " s";
  return std::to_string(whole / 3600) + " h " + two_digits(whole % 3600 / 60) + " min";
}

size_t shown_width(const std::string& text) {
  size_t width = 0;
  for (const char c : text) width += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
  return width;
}

}  // namespace convergence
