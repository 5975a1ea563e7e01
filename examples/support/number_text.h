// Numbers as text that no locale changes.
#pragma once

#include <array>
#include <charconv>
#include <string>

namespace examples {

// The shortest text that reads back to the same value: "0.003", "6e-04", "nan".
inline std::string shortest_text(double value) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return std::string(text.data(), end);
}

// Fixed notation: "1.250".
inline std::string fixed_text(double value, int decimals) {
  std::array<char, 384> text;  // the longest double has 309 digits before the point
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed, decimals).ptr;
  return std::string(text.data(), end);
}

}  // namespace examples
