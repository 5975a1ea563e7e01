// Text to value, strictly: the whole text must be one value inside its range. Every function throws
// pacer::InvalidArgument that says what was expected; naming the option and its source is the caller's part.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace convergence {

struct CountRange {
  int64_t minimum;
  int64_t maximum;
};

struct NumberRange {
  double minimum;
  double maximum;
  bool minimum_allowed = true;
};

int64_t parse_count(const std::string& text, CountRange range);   // "300", "500k", "1.5M", "2G"
double parse_number(const std::string& text, NumberRange range);  // "3e-4"
bool parse_switch(const std::string& text);                       // true, false, yes, no, on, off, 1, 0
std::string parse_text(const std::string& text);                  // anything but nothing
std::string parse_choice(const std::string& text, const std::vector<std::string>& choices);
std::vector<std::string> parse_names(const std::string& text, const std::vector<std::string>& known);
std::vector<uint64_t> parse_seeds(const std::string& text);  // distinct whole numbers, separated by commas

std::string show_number(double value);  // shortest text that reads back to the same value
std::string join(const std::vector<std::string>& parts);
std::string join(const std::vector<uint64_t>& parts);

}  // namespace convergence
