// Where records of the Metrics hook go: metrics.jsonl, metrics.csv and an event file of TensorBoard, each if
// wanted. They may fail: what cannot be written is counted and dropped, so that a full disk ends no training.
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
struct MetricsOptions;
}

namespace pacer::detail {

class MetricsFiles {
 public:
  // Throws FileError where the constructor would, for what is in the files; changes nothing.
  static void check(const MetricsOptions& options, int64_t step);
  // For a run that starts with `step` steps behind it: what the files have beyond it is removed. FileError
  // where a file cannot be read or written.
  MetricsFiles(const MetricsOptions& options, int64_t step);

  // Returns a sentence to warn with where this is the run's first failure. After the n-th failure in a row the
  // next 2^(n-1) - 1 records, at most 255, are dropped at once: to go on, files are read from their beginning.
  // The first record behind them removes what was written of the one that failed, from all files but
  // TensorBoard's.
  std::optional<std::string> write(const MetricsRecord& record);
  // Flushes TensorBoard's file, which keeps what it cannot write and tries again at the next call; the others have
  // reached the operating system already. Returns as write().
  std::optional<std::string> flush();
  // Returns what a run that ends has to say of its failures; nothing where there were none.
  std::optional<std::string> final_warning() const;

 private:
  void open();
  void put(const MetricsRecord& record);  // FileError where a file cannot take it
  std::optional<std::string> first_failure(const std::string& reason, const char* consequence);

  std::string stem_;
  bool wants_jsonl_, wants_csv_;
  int64_t last_step_;  // that the files have, or may have
  bool is_open_ = false;
  std::optional<JsonLinesFile> jsonl_;
  std::optional<MetricsCsv> csv_;
  std::optional<TensorBoardFile> tensorboard_;
  int64_t records_ = 0, lost_ = 0;
  int failures_in_a_row_ = 0;
  int64_t drop_next_ = 0;
  std::string last_reason_;   // of the newest failure of write(); empty: none so far
  std::string flush_reason_;  // why TensorBoard's file is behind; empty: it is not
  bool has_warned_ = false;
};

// The whole lines that are records of a step up to `step`; all others, and a last one cut short, are left
// out.
std::string json_lines_up_to(std::string_view text, int64_t step);

}  // namespace pacer::detail
