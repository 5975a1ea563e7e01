// Numbers as people read them, in the C locale whatever the environment says. Used by the table, the progress
// lines and the report.
#pragma once

#include <cstdint>
#include <string>

namespace convergence {

std::string fixed(double value, int decimals);         // "1.250"; "nan" and "inf" by name
std::string signed_fixed(double value, int decimals);  // "+0.012", "-0.003", and "0.000" without a sign
std::string significant(double value,
                        int digits);        // shortest of fixed notation with that many digits: "0.0021"
std::string with_thousands(int64_t value);  // "1,234,567"
std::string short_count(double value);      // "850", "1.5k", "3M"
std::string duration(double seconds);       // "8.4 s", "2 min 05 s", "1 h 04 min"

// Number of characters shown for UTF-8 text (code points; all our text is one column per code point).
size_t shown_width(const std::string& text);

}  // namespace convergence
