#include <pacer/metrics/detail/metrics_csv.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/detail/replaced_file.h>
#include <pacer/files/number_text.h>

namespace pacer::detail {
namespace {

std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string cell = "\"";
  for (const char c : text) cell += c == '"' ? "\"\"" : std::string(1, c);
  return cell + '"';
}

std::string csv_header(const std::vector<std::string>& columns) {
  std::string line;
  for (const std::string& column : columns) line += (line.empty() ? "" : ",") + csv_cell(column);
  return line + '\n';
}

std::string csv_row(const std::vector<std::string>& columns, const MetricsRecord& record) {
  std::string line = std::to_string(record.step) + ',' + std::to_string(record.tokens);
  for (size_t i = 2; i < columns.size(); ++i) {
    const auto value = record.find(columns[i]);
    line += ',';
    if (value) line += exact_text(*value);
  }
  return line + '\n';
}

bool is_row_up_to(std::string_view line, size_t columns, int64_t step) {
  int64_t found = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), found);
  const auto commas = static_cast<size_t>(std::count(line.begin(), line.end(), ','));
  return error == std::errc() && end != line.data() + line.size() && *end == ',' && found <= step &&
         commas + 1 == columns;
}

void require_columns(const CsvTable& table, const std::string& path) {
  const auto& columns = table.columns;
  require<FileError>(
      columns.empty() || (columns.size() >= 2 && columns[0] == "step" && columns[1] == "tokens"),
      "cannot continue ", path, ": its first columns are not step and tokens; move it out of the way");
}

}  // namespace

void check_metrics_csv(const std::string& path) {
  if (const auto old = content_if_there(path)) require_columns(split_csv(*old), path);
}

CsvTable split_csv(std::string_view text) {
  CsvTable table;
  std::string cell;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      const bool doubled = c == '"' && i + 1 < text.size() && text[i + 1] == '"';
      if (c != '"' || doubled) cell += c;
      quoted = c != '"' || doubled;
      i += doubled ? 1 : 0;
    } else if (c == '"') {
      quoted = true;
    } else if (c == ',' || c == '\n') {
      table.columns.push_back(std::exchange(cell, ""));
      table.rows = text.substr(i + 1);
      if (c == '\n') return table;
    } else {
      cell += c;
    }
  }
  return {};
}

std::string csv_rows_up_to(const CsvTable& table, int64_t step) {
  std::string kept;
  std::string_view rest = table.rows;
  for (size_t end; (end = rest.find('\n')) != std::string_view::npos; rest.remove_prefix(end + 1)) {
    if (is_row_up_to(rest.substr(0, end), table.columns.size(), step)) kept += rest.substr(0, end + 1);
  }
  return kept;
}

MetricsCsv::MetricsCsv(std::string path, int64_t step) : path_(std::move(path)) {
  if (step == 0) {
    file_ = OutputFile(path_, StreamMode::truncate);
    return;
  }
  if (const auto old = content_if_there(path_)) {
    CsvTable table = split_csv(*old);
    const auto& columns = table.columns;
    require_columns(table, path_);
    const std::string kept = columns.empty() ? "" : csv_header(columns) + csv_rows_up_to(table, step);
    if (kept != *old) replace_file(path_, kept);
    columns_ = std::move(table.columns);
  }
  file_ = OutputFile(path_, StreamMode::append);
}

void MetricsCsv::write(const MetricsRecord& record) {
  const bool complete = std::all_of(record.values.begin(), record.values.end(), [&](const auto& value) {
    return std::find(columns_.begin(), columns_.end(), value.first) != columns_.end();
  });
  if (columns_.empty() || !complete) add_columns(record);
  file_.write(csv_row(columns_, record));
}

void MetricsCsv::add_columns(const MetricsRecord& record) {
  std::vector<std::string> columns = columns_;
  if (columns.empty()) columns = {"step", "tokens"};
  for (const auto& [name, value] : record.values) {
    if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
  }
  if (columns_.empty()) {
    file_.write(csv_header(columns));
  } else {
    const std::string old = content_if_there(path_).value_or("");
    const std::string empty_cells(columns.size() - columns_.size(), ',');
    std::string text = csv_header(columns);
    for (const char c : split_csv(old).rows) {
      if (c == '\n') text += empty_cells;
      text += c;
    }
    replace_file(path_, text);
    file_ = OutputFile(path_, StreamMode::append);
  }
  columns_ = std::move(columns);
}

}  // namespace pacer::detail
