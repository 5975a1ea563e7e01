#include <pacer/metrics/detail/metrics_writer.h>

#include <algorithm>
#include <utility>

#include <pacer/core/error.h>

namespace pacer::detail {

MetricsWriter::MetricsWriter(const MetricsOptions& options, int64_t step) : files_(options, step) {}

std::optional<std::string> MetricsWriter::first_failure(const std::string& reason, const char* consequence) {
  if (std::exchange(has_warned_, true)) return std::nullopt;
  return concatenate("metrics: ", reason, "; ", consequence, " and training goes on; make room on that disk");
}

std::optional<std::string> MetricsWriter::write(const MetricsRecord& record) {
  constexpr int kMostDoublings = 8;
  ++records_;
  if (drop_next_ > 0) {
    --drop_next_;
    ++lost_;
    return std::nullopt;
  }
  try {
    files_.write(record);
    failures_in_a_row_ = 0;
    return std::nullopt;
  } catch (const FileError& error) {
    ++lost_;
    drop_next_ = (int64_t{1} << std::min(failures_in_a_row_++, kMostDoublings)) - 1;
    last_reason_ = error.what();
    return first_failure(last_reason_, "the record is lost,");
  }
}

std::optional<std::string> MetricsWriter::flush() {
  try {
    files_.flush();
    flush_reason_.clear();
    return std::nullopt;
  } catch (const FileError& error) {
    flush_reason_ = error.what();
    return first_failure(flush_reason_, "curves wait in memory");
  }
}

std::optional<std::string> MetricsWriter::final_warning() const {
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
