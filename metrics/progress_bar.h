// What a person watches while training goes on: a bar that draws its line again and again on a terminal, one
// line per point elsewhere, and on a terminal that cannot move its cursor (TERM=dumb). The Metrics hook uses
// it; it works alone, too.
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
  std::optional<double> loss, learning_rate, tokens_per_second, gradient_norm, validation;
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
  // A terminal shows at most 20 points a second, and the last one in any case. It goes on showing the last
  // value of validation, and a point without a loss adds to the one before.
  void show(const ProgressPoint& point);
  // Writes a line of the program's own and draws the bar again below it. A line end is added.
  void print(const std::string& line);
  // Clears the bar's line, so that something else may be written there; the next point draws it again.
  void interrupt();
  // Ends the bar's line, so that other output may follow.
  void finish();

  // "step 120 of 1,000  loss 2.3456  lr 0.0003  12.3k tokens/s  gradient norm 0.81"
  std::string plain_line(const ProgressPoint& point) const;
  // The same behind a bar and the share done, with the time left where `seconds` have passed since begin(),
  // in at most `columns` characters of UTF-8. What has no room is left out as a whole, and with it what
  // matters less: the long bar goes first (a short one stays), then tokens/s, gradient norm, time left, the
  // short bar, learning rate, validation, share and step; the loss stays longest.
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
