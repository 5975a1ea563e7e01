// Where records of the Metrics hook go: metrics.jsonl, metrics.csv and an event file of TensorBoard, each if
// wanted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <pacer/files/json_lines.h>
#include <pacer/files/tensorboard_events.h>
#include <pacer/metrics/detail/metrics_csv.h>
#include <pacer/metrics/detail/metrics_record.h>

namespace pacer {
class MetricsOptions;
}

namespace pacer::detail {

class MetricsFiles {
 public:
  // Throws FileError where the constructor would, for what is in the files; changes nothing.
  static void check(const MetricsOptions& options, int64_t step);
  // For a run that starts with `step` steps behind it: what the files have beyond it is removed. FileError
  // where a file cannot be read or written.
  MetricsFiles(const MetricsOptions& options, int64_t step);

  // FileError where a file cannot take the record. The next call removes what was written of it, from all
  // files but TensorBoard's, and goes on with its own.
  void write(const MetricsRecord& record);
  // TensorBoard's file; the others have reached the operating system already.
  void flush();

 private:
  void open();

  std::string stem_;
  bool wants_jsonl_, wants_csv_;
  int64_t last_step_;  // that the files have, or may have
  bool is_open_ = false;
  std::optional<JsonLinesFile> jsonl_;
  std::optional<MetricsCsv> csv_;
  std::optional<TensorBoardFile> tensorboard_;
};

// The whole lines that are records of a step up to `step`; all others, and a last one cut short, are left
// out.
std::string json_lines_up_to(std::string_view text, int64_t step);

}  // namespace pacer::detail
