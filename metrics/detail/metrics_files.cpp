#include <pacer/metrics/detail/metrics_files.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/detail/replaced_file.h>
#include <pacer/metrics/metrics.h>

namespace pacer::detail {
namespace {

JsonLinesFile continued_json_lines(const std::string& path, int64_t step) {
  if (step == 0) return JsonLinesFile(path);
  if (const auto old = content_if_there(path)) {
    const std::string kept = json_lines_up_to(*old, step);
    if (kept != *old) replace_file(path, kept);
  }
  return JsonLinesFile(path, JsonLinesFile::Mode::append);
}

bool is_record_up_to(std::string_view line, int64_t step) {
  constexpr std::string_view kBegin = R"({"step":)";
  if (line.substr(0, kBegin.size()) != kBegin || line.back() != '}') return false;
  // A record cut short by a full disk, with the next one behind it. No key can look like that: its quotes
  // would be escaped.
  if (line.find(kBegin, 1) != std::string_view::npos) return false;
  int64_t found = 0;
  const char* const digits = line.data() + kBegin.size();
  const auto [end, error] = std::from_chars(digits, line.data() + line.size(), found);
  return error == std::errc() && (*end == ',' || *end == '}') && found <= step;
}

// A double beyond the range of fp32 is an infinity there; the conversion itself would be undefined.
float fp32_of(double value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  if (value > kLargest) return std::numeric_limits<float>::infinity();
  if (value < -kLargest) return -std::numeric_limits<float>::infinity();
  return static_cast<float>(value);
}

std::string metrics_stem(const MetricsOptions& options) {
  return options.folder() + (options.folder().back() == '/' ? "metrics." : "/metrics.");
}

}  // namespace

std::string json_lines_up_to(std::string_view text, int64_t step) {
  std::string kept;
  for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1)) {
    if (is_record_up_to(text.substr(0, end), step)) kept += text.substr(0, end + 1);
  }
  return kept;
}

void MetricsFiles::check(const MetricsOptions& options, int64_t step) {
  if (options.csv() && step > 0) check_metrics_csv(metrics_stem(options) + "csv");
}

MetricsFiles::MetricsFiles(const MetricsOptions& options, int64_t step)
    : stem_(metrics_stem(options)),
      wants_jsonl_(options.jsonl()),
      wants_csv_(options.csv()),
      last_step_(step) {
  open();
  if (!options.tensorboard()) return;
  tensorboard_.emplace(options.folder());
  tensorboard_->add_start(step + 1);
}

void MetricsFiles::open() {
  jsonl_.reset();
  csv_.reset();
  if (wants_jsonl_) jsonl_.emplace(continued_json_lines(stem_ + "jsonl", last_step_));
  if (wants_csv_) csv_.emplace(stem_ + "csv", last_step_);
  is_open_ = true;
}

void MetricsFiles::put(const MetricsRecord& record) {
  if (!is_open_) open();
  is_open_ = false;  // unless all goes well
  if (jsonl_) {
    JsonLine line;
    line.add("step", record.step).add("tokens", record.tokens);
    for (const auto& [name, value] : record.values) line.add(name, value);
    jsonl_->write(line);
  }
  if (csv_) csv_->write(record);
  if (tensorboard_) {
    tensorboard_->add_scalar("tokens", record.step, static_cast<float>(record.tokens));
    for (const auto& [name, value] : record.values) {
      tensorboard_->add_scalar(name, record.step, fp32_of(value));
    }
  }
  last_step_ = record.step;
  is_open_ = true;
}

std::optional<std::string> MetricsFiles::first_failure(const std::string& reason, const char* consequence) {
  if (std::exchange(has_warned_, true)) return std::nullopt;
  return concatenate("metrics: ", reason, "; ", consequence, " and training goes on; make room on that disk");
}

std::optional<std::string> MetricsFiles::write(const MetricsRecord& record) {
  constexpr int kMostDoublings = 8;
  ++records_;
  if (drop_next_ > 0) {
    --drop_next_;
    ++lost_;
    return std::nullopt;
  }
  try {
    put(record);
    failures_in_a_row_ = 0;
    return std::nullopt;
  } catch (const FileError& error) {
    ++lost_;
    drop_next_ = (int64_t{1} << std::min(failures_in_a_row_++, kMostDoublings)) - 1;
    last_reason_ = error.what();
    return first_failure(last_reason_, "the record is lost,");
  }
}

std::optional<std::string> MetricsFiles::flush() {
  try {
    if (tensorboard_) tensorboard_->flush();
    flush_reason_.clear();
    return std::nullopt;
  } catch (const FileError& error) {
    flush_reason_ = error.what();
    return first_failure(flush_reason_, "curves wait in memory");
  }
}

std::optional<std::string> MetricsFiles::final_warning() const {
  if (lost_ > 0) {
    return concatenate("metrics: ", lost_, " of this run's ", records_, " records were lost (", last_reason_,
                       "); the training itself is complete");
  }
  if (!flush_reason_.empty()) {
    return concatenate("metrics: TensorBoard's curves lack their end (", flush_reason_,
                       "); metrics.jsonl and metrics.csv have it where they are written");
  }
  return std::nullopt;
}

}  // namespace pacer::detail
