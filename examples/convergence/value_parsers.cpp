// The strict parsers, on std::from_chars: no locale, no silent truncation, overflow is told apart from
// nonsense.
#include "value_parsers.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include <pacer/core/error.h>

#include "format.h"
#include "support/nearest_name.h"

namespace convergence {
namespace {

constexpr size_t kMostSeeds = 1000;

// Parses a floating-point number that takes up the whole text; false where it is none or overflows.
bool read_number(const std::string& text, double* value) {
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, *value);
  return result.ec == std::errc() && result.ptr == end && std::isfinite(*value);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t comma = text.find(',', begin);
    std::string part = text.substr(begin, comma == std::string::npos ? comma : comma - begin);
    part.erase(0, part.find_first_not_of(' '));
    part.erase(part.find_last_not_of(' ') + 1);
    parts.push_back(std::move(part));
    if (comma == std::string::npos) return parts;
    begin = comma + 1;
  }
}

template <class Value>
void require_distinct(const std::vector<Value>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    pacer::require(std::count(values.begin(), values.end(), values[i]) == 1, "'", values[i],
                   "' is there twice");
  }
}

}  // namespace

int64_t parse_count(const std::string& text, CountRange range) {
  std::string digits = text;
  double factor = 1.0;
  if (!digits.empty() && (digits.back() == 'k' || digits.back() == 'M' || digits.back() == 'G')) {
    factor = digits.back() == 'k' ? 1e3 : digits.back() == 'M' ? 1e6 : 1e9;
    digits.pop_back();
  }
  // Doubles hold every whole number up to 2^53, which is beyond every range in use.
  double value = 0.0;
  const bool plain = digits.find_first_not_of("0123456789.") == std::string::npos;
  const bool whole = plain && read_number(digits, &value) && value * factor == std::floor(value * factor);
  pacer::require(whole && value * factor >= static_cast<double>(range.minimum) &&
                     value * factor <= static_cast<double>(range.maximum),
                 "expected a whole number from ", range.minimum, " to ", range.maximum);
  return static_cast<int64_t>(value * factor);
}

double parse_number(const std::string& text, NumberRange range) {
  double value = 0.0;
  const bool inside = read_number(text, &value) && value <= range.maximum &&
                      (range.minimum_allowed ? value >= range.minimum : value > range.minimum);
  pacer::require(inside, "expected a number ", range.minimum_allowed ? "from " : "above ", range.minimum,
                 range.minimum_allowed ? " to " : " and at most ", range.maximum);
  return value;
}

bool parse_switch(const std::string& text) {
  for (const char* const yes : {"true", "yes", "on", "1"}) {
    if (text == yes) return true;
  }
  for (const char* const no : {"false", "no", "off", "0"}) {
    if (text == no) return false;
  }
  throw pacer::InvalidArgument("expected true or false");
}

std::string parse_text(const std::string& text) {
  pacer::require(!text.empty(), "expected a path");
  return text;
}

std::string parse_choice(const std::string& text, const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), text) != choices.end()) return text;
  throw pacer::InvalidArgument("there is no '" + text + "'; " + examples::suggestion(text, choices));
}

std::vector<std::string> parse_names(const std::string& text, const std::vector<std::string>& known) {
  std::vector<std::string> names = split(text);
  for (const auto& name : names) {
    pacer::require(std::find(known.begin(), known.end(), name) != known.end(), "there is no '", name, "'; ",
                   examples::suggestion(name, known));
  }
  require_distinct(names);
  return names;
}

std::vector<uint64_t> parse_seeds(const std::string& text) {
  std::vector<uint64_t> seeds;
  for (const auto& part : split(text)) {
    uint64_t seed = 0;
    const char* const end = part.data() + part.size();
    const auto result = std::from_chars(part.data(), end, seed);
    pacer::require(result.ec == std::errc() && result.ptr == end,
                   "expected whole numbers from 0 to 18446744073709551615, separated by commas");
    seeds.push_back(seed);
  }
  require_distinct(seeds);
  pacer::require(seeds.size() <= kMostSeeds, "expected at most ", kMostSeeds, " seeds");
  return seeds;
}

std::string show_number(double value) {
  std::array<char, 32> text;
  const auto result = std::to_chars(text.data(), text.data() + text.size(), value);
  return std::string(text.data(), result.ptr);
}

std::string join(const std::vector<std::string>& parts) {
  std::string joined;
  for (const auto& part : parts) joined += (joined.empty() ? "" : ",") + part;
  return joined;
}

std::string join(const std::vector<uint64_t>& parts) {
  std::vector<std::string> texts;
  for (const uint64_t part : parts) texts.push_back(std::to_string(part));
  return join(texts);
}

}  // namespace convergence
