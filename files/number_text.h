// Numbers as people read them, in the C locale whatever the environment says.
#pragma once

#include <cstdint>
#include <string>

namespace pacer {

// Returns fixed notation: "1.250"; "nan", "inf" and "-inf" by name.
std::string fixed_text(double value, int decimals);
// Returns so many significant digits: "0.0003", "2.5e-07".
std::string short_text(double value, int digits);
// Returns as few digits as tell it from all others, so that it reads back to the same bits: "0.1", "1e-07".
std::string exact_text(double value);
// Returns "1,234,567" for 1234567.
std::string with_thousands(int64_t value);
// Returns three digits and a unit: "850", "1.5k", "3M".
std::string short_count(double value);
// Returns the two largest units: "8.4 s", "2 min 05 s", "1 h 04 min"; "unknown" for what is no duration.
std::string duration_text(double seconds);

}  // namespace pacer
