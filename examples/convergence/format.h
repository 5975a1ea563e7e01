// Numbers as people read them, in the C locale whatever the environment says. Used by the table, the progress
// lines and the report.
#pragma once

#include <cstdint>
#include <string>

#include <pacer/files/number_text.h>

namespace convergence {

using pacer::duration_text;
using pacer::fixed_text;
using pacer::short_count;
using pacer::with_thousands;

std::string count_of(int64_t count, const std::string& what, const std::string& ending = "s");  // "2 arms"
std::string signed_fixed(double value, int decimals);  // "+0.012", "-0.003", and "0.000" without a sign
std::string significant(double value, int digits);     // in fixed notation with that many digits: "0.0021"

// Number of characters shown for UTF-8 text (code points; all our text is one column per code point).
size_t shown_width(const std::string& text);

}  // namespace convergence
