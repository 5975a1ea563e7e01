// A table of text with aligned columns.
#pragma once

#include <string>
#include <vector>

namespace bench {

// The first row is the head; the first column is aligned left, all others right.
std::string aligned(const std::vector<std::vector<std::string>>& rows);

// printf-style numbers: "12.34" for format("%.2f", 12.34).
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// Four significant digits, for times in milliseconds: "0.8223", "15.38", "921.4".
std::string milliseconds_text(double milliseconds);

}  // namespace bench
