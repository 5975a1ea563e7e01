// metrics.csv: a header, then a row of numbers per record (RFC 4180, lines end with \n alone). The first
// column is the step.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <pacer/files/file_descriptor.h>
#include <pacer/metrics/detail/metrics_record.h>

namespace pacer::detail {

class MetricsCsv {
 public:
  // Empties the file where `step` is 0; otherwise rows beyond that step, and any that is not whole, are
  // removed. FileError; also for a file that begins with something else than a header with the column step.
  MetricsCsv(std::string path, int64_t step);

  // A key without a column gets one: the file is replaced, earlier rows have an empty cell there. FileError;
  // the row may be there in part then, and the file must be continued by a new MetricsCsv.
  void write(const MetricsRecord& record);

 private:
  void add_columns(const MetricsRecord& record);

  std::string path_;
  std::vector<std::string> columns_;  // empty: the file is empty
  OutputFile file_;
};

// A table as it is in such a file: the header's cells, and the text of the rows behind it.
struct CsvTable {
  std::vector<std::string> columns;  // none where the header is not whole
  std::string_view rows;
};
CsvTable split_csv(std::string_view text);

// Throws FileError as MetricsCsv does for a table that it cannot continue; nothing where there is no file.
void check_metrics_csv(const std::string& path);

// The whole rows of a step up to `step`.
std::string csv_rows_up_to(const CsvTable& table, int64_t step);

}  // namespace pacer::detail
