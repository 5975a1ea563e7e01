// What a person watches while training goes on: a bar that draws its line again and again on a terminal, one
// line per point elsewhere. The Metrics hook uses it; it works alone, too.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace pacer {

// What is shown; nothing is said of what is not known.
struct ProgressPoint {
  int64_t step = 0;
  int64_t tokens = 0;
  std::optional<double> loss, learning_rate, tokens_per_second, gradient_norm;
};

class ProgressBar {
 public:
  // Training ends at that many steps or tokens; 0 where it is not known. Tokens count where both are. `out`
  // must outlive the bar; failures to write to it are ignored.
  explicit ProgressBar(int64_t total_steps = 0, int64_t total_tokens = 0, std::FILE* out = stdout);
  // Ends the bar's line where finish() was forgotten.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // Where this run starts: the time that is left is told from there.
  void begin(int64_t step, int64_t tokens);
  // A terminal shows at most 20 points a second, and the last one in any case.
  void show(const ProgressPoint& point);
  // Ends the bar's line, so that other output may follow.
  void finish();

  // "step 120 of 1,000  loss 2.3456  lr 0.0003  12.3k tokens/s  gradient norm 0.81"
  std::string plain_line(const ProgressPoint& point) const;
  // The same behind a bar and the share done, with the time left where `seconds` have passed since begin();
  // cut to `columns` characters of UTF-8.
  std::string bar_line(const ProgressPoint& point, double seconds, size_t columns) const;

 private:
  using Clock = std::chrono::steady_clock;
  double share(int64_t step, int64_t tokens) const;
  void draw();

  int64_t total_steps_, total_tokens_;
  std::FILE* out_;
  bool terminal_;
  double first_share_ = 0;
  Clock::time_point begun_;
  Clock::time_point drawn_;  // the epoch: never
  ProgressPoint last_;
  bool line_open_ = false;
  bool last_is_drawn_ = true;
};

}  // namespace pacer
