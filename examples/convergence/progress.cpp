// Drawing of the progress bar and of the plain lines.
#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "format.h"

namespace convergence {
namespace {

constexpr size_t kBarWidth = 24;
constexpr size_t kFallbackColumns = 80;

size_t terminal_columns() {
  winsize size{};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kFallbackColumns;
}

std::string pad_left(const std::string& text, size_t width) {
  return std::string(width - std::min(width, shown_width(text)), ' ') + text;
}

bool can_redraw() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDOUT_FILENO) != 0 && !(terminal != nullptr && std::strcmp(terminal, "dumb") == 0);
}

template <class Point>
std::string speed(const Point& point) {
  return short_count(static_cast<double>(point.tokens) / std::max(point.seconds, 1e-9)) + " tokens/s";
}

void put(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

}  // namespace

Progress::Progress(std::string name, int64_t tokens)
    : name_(std::move(name)), tokens_(tokens), terminal_(can_redraw()) {}

void Progress::on_training(const TrainingPoint& point) {
  training_ = point;
  loss_sum_ += point.loss;
  ++points_;
  draw_bar();
}

void Progress::on_validation(const CurvePoint& point) {
  validation_ = point;
  if (terminal_) {
    draw_bar();
    return;
  }
  const std::string tokens = with_thousands(tokens_);
  std::string line = name_ + "  " + pad_left(with_thousands(point.tokens), tokens.size()) + " of " + tokens +
                     " tokens  validation " + fixed(point.value, 3);
  if (points_ > 0) {
    line += "  training " + fixed(loss_sum_ / static_cast<double>(points_), 3) + "  " +
            pad_left(speed(point), 14);
  }
  loss_sum_ = 0.0;
  points_ = 0;
  put(line + "\n");
}

void Progress::draw_bar() {
  if (!terminal_) return;
  const double share = std::min(1.0, static_cast<double>(training_.tokens) / static_cast<double>(tokens_));
  const auto filled = static_cast<size_t>(share * static_cast<double>(kBarWidth));
  std::string bar;
  for (size_t i = 0; i < kBarWidth; ++i) bar += i < filled ? "━" : "╌";
  std::string line = name_ + " " + bar + pad_left(fixed(100.0 * share, 0), 4) + " %";
  std::vector<std::string> fields;
  if (training_.tokens > 0) {
    fields = {"training " + fixed(training_.loss, 3), "validation " + fixed(validation_.value, 3),
              duration(training_.seconds * (1.0 / share - 1.0)) + " left", speed(training_)};
  }
  // Whole fields, or none: half a number would be another number.
  const size_t columns = terminal_columns() - 1;
  if (shown_width(line) > columns) line = shown_width(name_) > columns ? "" : name_;
  for (const std::string& field : fields) {
    if (shown_width(line) + 2 + shown_width(field) > columns) break;
    line += "  " + field;
  }
  put("\r" + line + "\x1b[K");
}

void Progress::clear_bar() {
  if (terminal_) put("\r\x1b[K");
}

void Progress::finish(const Run& run) {
  clear_bar();
  put(name_ + "  validation " + fixed(run.validation.back().value, 4) + " after " +
      with_thousands(run.validation.back().tokens) + " tokens in " + duration(run.seconds()) + "\n");
}

}  // namespace convergence
