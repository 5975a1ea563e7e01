#include "report.h"

#include <algorithm>

#include <pacer/files/number_text.h>

namespace schedule {
namespace {

std::string count_text(double value) { return pacer::with_thousands(static_cast<int64_t>(value)); }

std::string rate_text(double value) { return pacer::short_text(value, 4); }

std::string layers_text(double value) { return pacer::fixed_text(value, 2); }

std::string percent(double share) { return pacer::fixed_text(100 * share, 1) + " %"; }

std::string place_text(const Place& place, bool counts_tokens) {
  const std::string step = "step " + pacer::with_thousands(place.steps);
  return counts_tokens ? step + ", token " + pacer::with_thousands(place.tokens) : step;
}

std::string line(const std::string& what, const std::string& is) {
  constexpr size_t kIndent = 22;
  return what + std::string(kIndent - what.size(), ' ') + is + "\n";
}

}  // namespace

std::vector<Column> columns_of(const Run& run) {
  std::vector<Column> columns = {
      {"step", "step", "step", [](const Row& row) { return static_cast<double>(row.steps); }, count_text}};
  if (run.sizes.sequences > 0) {
    columns.push_back({"tokens", "tokens", "tokens",
                       [](const Row& row) { return static_cast<double>(row.tokens); }, count_text});
  }
  columns.push_back(
      {"rate", "learning_rate", "learning rate", [](const Row& row) { return row.rate; }, rate_text});
  if (run.sizes.batch) {
    columns.push_back({"batch", "micro_steps", "micro-steps of a step",
                       [](const Row& row) { return static_cast<double>(row.micro_steps); }, count_text});
  }
  if (run.sizes.length) {
    columns.push_back({"length", "length", "tokens of a sequence",
                       [](const Row& row) { return static_cast<double>(row.length); }, count_text});
  }
  if (run.layers > 0) {
    columns.push_back({"layers", "kept_layers", "layers that run, on average",
                       [](const Row& row) { return row.kept; }, layers_text});
  }
  return columns;
}

std::string table_text(const std::vector<Column>& columns, const std::vector<Row>& rows) {
  std::vector<std::string> lines(rows.size() + 1);
  for (const Column& column : columns) {
    std::vector<std::string> cells = {column.title};
    for (const Row& row : rows) cells.push_back(column.text(column.value(row)));
    size_t width = 0;
    for (const std::string& cell : cells) width = std::max(width, cell.size());
    const size_t gap = &column == &columns.front() ? 0 : 3;
    for (size_t i = 0; i < lines.size(); ++i)
      lines[i] += std::string(gap + width - cells[i].size(), ' ') + cells[i];
  }
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

std::string csv_text(const std::vector<Column>& columns, const std::vector<Row>& rows) {
  std::string text;
  const auto comma = [&](const Column& column) { return &column == &columns.front() ? "" : ","; };
  for (const Column& column : columns) text += comma(column) + column.name;
  for (const Row& row : rows) {
    text += "\n";
    for (const Column& column : columns) text += comma(column) + pacer::exact_text(column.value(row));
  }
  return text + "\n";
}

std::string summary_text(const Run& run, const Course& course) {
  const bool counts_tokens = run.sizes.sequences > 0;
  const auto tokens = [&](int64_t count) {
    return counts_tokens ? ", " + pacer::with_thousands(count) + " tokens" : std::string();
  };
  const auto event = [&](const std::string& what, const std::string& happens,
                         const std::optional<Place>& place) {
    return line(what, happens + (place ? " at " + place_text(*place, counts_tokens) : " after this run"));
  };
  std::string text =
      line("the run", pacer::with_thousands(run.end.steps) + " steps" + tokens(run.end.tokens));
  // Without a warm-up it is over before the run.
  if (!course.warmup_end || course.warmup_end->steps > 0) text += event("warm-up", "ends", course.warmup_end);
  if (run.decays) text += event("decay", "first lowers the rate", course.decay_begin);
  text += line("last rate", rate_text(course.points.back().rate));
  text +=
      line("mean rate", percent(course.mean_over_steps) + " of the peak over steps" +
                            (counts_tokens ? ", " + percent(course.mean_over_tokens) + " over tokens" : ""));
  text += line("above half the peak",
               pacer::with_thousands(course.above_half.steps) + " steps" + tokens(course.above_half.tokens));
  if (run.sizes.batch) text += event("batch", "has its last change", course.batch_end);
  if (run.sizes.length) text += event("length", "has its last change", course.length_end);
  if (run.layers > 0) {
    text += line("layers", "compute " + percent(course.kept_share) + " of what all of them would");
  }
  return text;
}

}  // namespace schedule
