#include <pacer/schedulers/progress_bar.h>

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include <pacer/schedulers/detail/number_text.h>

namespace pacer {
namespace {

constexpr size_t kBarWidth = 24;
constexpr size_t kFallbackColumns = 80;
constexpr std::chrono::milliseconds kRedrawInterval{50};

size_t terminal_columns(std::FILE* out) {
  winsize size{};
  const bool known = ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kFallbackColumns;
}

// The first `columns` characters of UTF-8 text.
std::string cut_to(const std::string& text, size_t columns) {
  size_t end = 0;
  for (size_t shown = 0; end < text.size(); ++end) {
    const bool begins = (static_cast<unsigned char>(text[end]) & 0xC0) != 0x80;
    if (begins && shown++ == columns) break;
  }
  return text.substr(0, end);
}

void put_text(const std::string& text, std::FILE* out) {
  std::fwrite(text.data(), 1, text.size(), out);
  std::fflush(out);
}

}  // namespace

ProgressBar::ProgressBar(int64_t total_steps, int64_t total_tokens, std::FILE* out)
    : total_steps_(total_steps),
      total_tokens_(total_tokens),
      out_(out),
      terminal_(isatty(fileno(out)) != 0),
      begun_(Clock::now()) {}

ProgressBar::~ProgressBar() { finish(); }

void ProgressBar::begin(int64_t step, int64_t tokens) {
  first_share_ = share(step, tokens);
  begun_ = Clock::now();
}

void ProgressBar::show(const ProgressPoint& point) {
  if (!terminal_) {
    put_text(plain_line(point) + "\n", out_);
    return;
  }
  last_ = point;
  last_is_drawn_ = false;
  if (Clock::now() - drawn_ >= kRedrawInterval) draw();
}

void ProgressBar::draw() {
  drawn_ = Clock::now();
  const double seconds = std::chrono::duration<double>(drawn_ - begun_).count();
  // The last column stays free: some terminals begin a new line when it is written to.
  put_text("\r" + bar_line(last_, seconds, terminal_columns(out_) - 1) + "\x1b[K", out_);
  line_open_ = true;
  last_is_drawn_ = true;
}

void ProgressBar::finish() {
  if (!last_is_drawn_) draw();
  if (line_open_) put_text("\n", out_);
  line_open_ = false;
}

double ProgressBar::share(int64_t step, int64_t tokens) const {
  const bool by_tokens = total_tokens_ > 0;
  const int64_t total = by_tokens ? total_tokens_ : total_steps_;
  if (total <= 0) return 0;
  return std::clamp(static_cast<double>(by_tokens ? tokens : step) / static_cast<double>(total), 0.0, 1.0);
}

std::string ProgressBar::plain_line(const ProgressPoint& point) const {
  const std::string end = total_steps_ > 0 ? detail::with_thousands(total_steps_) : "";
  std::string step = detail::with_thousands(point.step);
  if (step.size() < end.size()) step.insert(0, end.size() - step.size(), ' ');
  std::string line = "step " + step;
  if (!end.empty()) line += " of " + end;
  if (point.loss) line += "  loss " + detail::fixed_text(*point.loss, 4);
  if (point.learning_rate) line += "  lr " + detail::short_text(*point.learning_rate, 3);
  if (point.tokens_per_second) line += "  " + detail::short_count(*point.tokens_per_second) + " tokens/s";
  if (point.gradient_norm) line += "  gradient norm " + detail::short_text(*point.gradient_norm, 3);
  return line;
}

std::string ProgressBar::bar_line(const ProgressPoint& point, double seconds, size_t columns) const {
  std::string line;
  if (total_steps_ > 0 || total_tokens_ > 0) {
    const double done = share(point.step, point.tokens);
    const auto filled = static_cast<size_t>(done * static_cast<double>(kBarWidth));
    for (size_t i = 0; i < kBarWidth; ++i) line += i < filled ? "━" : "╌";
    const std::string percent = detail::fixed_text(100.0 * done, 0);
    line += std::string(4 - std::min<size_t>(percent.size(), 3), ' ') + percent + " %  ";
    if (done > first_share_ && done < 1) {
      line += detail::duration_text(seconds * (1.0 - done) / (done - first_share_)) + " left  ";
    }
  }
  return cut_to(line + plain_line(point), columns);
}

}  // namespace pacer
