// What pacer-schedule shows of a run: columns of numbers, as a table, as CSV and as a drawing, and a summary.
#pragma once

#include <string>
#include <vector>

#include "run.h"

namespace schedule {

struct Column {
  std::string title;  // in the table
  std::string name;   // in CSV
  std::string about;  // above its panel of the drawing
  double (*value)(const Row& row);
  std::string (*text)(double value);
};

// Returns the columns that the run has a use for, "step" first.
std::vector<Column> columns_of(const Run& run);

std::string table_text(const std::vector<Column>& columns, const std::vector<Row>& rows);

std::string csv_text(const std::vector<Column>& columns, const std::vector<Row>& rows);

std::string summary_text(const Run& run, const Course& course);

// Draws one panel below the other for each column but the one of the title `x`, which is the axis.
std::string drawing(const std::vector<Column>& columns, const Course& course, const std::string& x);

}  // namespace schedule
