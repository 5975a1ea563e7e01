// What subcommands print: tables of text, with aligned columns and in Markdown as the pages of
// docs/measurements have them, and lines of JSON.
#pragma once

#include <string>
#include <vector>

#include <pacer/files/json_lines.h>

namespace bench {

// The first row is the head; the first column is aligned left, all others right.
std::string aligned(const std::vector<std::vector<std::string>>& rows);

// Prints the head of a table in Markdown. Names that end in ':' are of columns that are aligned right.
void print_head(const std::vector<std::string>& names);
// Prints a row of it at once: a whole table may take minutes.
void print_row(const std::vector<std::string>& cells);

// printf-style numbers: "12.34" for format("%.2f", 12.34).
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// Four significant digits, for times in milliseconds: "0.8223", "15.38", "921.4".
std::string milliseconds_text(double milliseconds);

// Prints a line of JSON at once.
void print(const pacer::JsonLine& line);

// For JSON: 12.35 for rounded(12.3456, 2).
double rounded(double value, int digits);

}  // namespace bench
