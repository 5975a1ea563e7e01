// On top of std::to_chars, which no locale changes.
#include <pacer/files/number_text.h>

#include <array>
#include <charconv>
#include <cmath>

namespace pacer {
namespace {

std::string formatted(double value, std::chars_format format, int precision) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 384> text;  // the longest double in fixed notation has 309 digits before the point
  const auto result = std::to_chars(text.data(), text.data() + text.size(), value, format, precision);
  return std::string(text.data(), result.ptr);
}

std::string two_digits(int64_t value) { return (value < 10 ? "0" : "") + std::to_string(value); }

}  // namespace

std::string fixed_text(double value, int decimals) {
  return formatted(value, std::chars_format::fixed, decimals);
}

std::string short_text(double value, int digits) {
  return formatted(value, std::chars_format::general, digits);
}

std::string exact_text(double value) {
  if (!std::isfinite(value)) return short_text(value, 1);
  std::array<char, 32> text;
  return std::string(text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr);
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
  const int decimals = std::fabs(value) < 9.995 ? 2 : std::fabs(value) < 99.95 ? 1 : 0;
  std::string text = fixed_text(value, decimals);
  if (text.find('.') != std::string::npos) {
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
  }
  return text + kSuffixes[suffix];
}

std::string duration_text(double seconds) {
  if (!(seconds >= 0.0 && seconds < 1e15)) return "unknown";
  if (seconds < 59.95) return fixed_text(seconds, 1) + " s";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return std::to_string(whole / 60) + " min " + two_digits(whole % 60) + " s";
  return std::to_string(whole / 3600) + " h " + two_digits(whole % 3600 / 60) + " min";
}

}  // namespace pacer
