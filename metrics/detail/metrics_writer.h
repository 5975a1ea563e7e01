// Writes records to files that may fail: what cannot be written is counted and dropped, so that a full disk
// ends no training.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <pacer/metrics/detail/metrics_files.h>

namespace pacer::detail {

class MetricsWriter {
 public:
  // Throws FileError if a file cannot be opened, as MetricsFiles does.
  MetricsWriter(const MetricsOptions& options, int64_t step);

  // Returns a sentence to warn with where this is the run's first failure. After the n-th failure in a row
  // the next 2^(n-1) - 1 records, at most 255, are dropped at once: to go on, files are read from their
  // beginning.
  std::optional<std::string> write(const MetricsRecord& record);
  // TensorBoard's file keeps what it cannot write and tries again at the next call; returns as write().
  std::optional<std::string> flush();
  // What a run that ends has to say of its failures; nothing where there were none.
  std::optional<std::string> final_warning() const;

 private:
  std::optional<std::string> first_failure(const std::string& reason, const char* consequence);

  MetricsFiles files_;
  int64_t records_ = 0, lost_ = 0;
  int failures_in_a_row_ = 0;
  int64_t drop_next_ = 0;
  std::string last_reason_;   // of the newest failure of write(); empty: none so far
  std::string flush_reason_;  // why TensorBoard's file is behind; empty: it is not
  bool has_warned_ = false;
};

}  // namespace pacer::detail
