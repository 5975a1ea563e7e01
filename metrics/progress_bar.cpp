#include <pacer/metrics/progress_bar.h>

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <pacer/files/number_text.h>

namespace pacer {
namespace {

constexpr size_t kLongBar = 24, kShortBar = 10;
constexpr size_t kFallbackColumns = 80;
constexpr std::chrono::milliseconds kRedrawInterval{50};

size_t terminal_columns(std::FILE* out) {
  winsize size{};
  const bool known = ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kFallbackColumns;
}

bool can_redraw(std::FILE* out) {
  const char* terminal = std::getenv("TERM");
  return isatty(fileno(out)) != 0 && !(terminal != nullptr && std::strcmp(terminal, "dumb") == 0);
}

// Characters of UTF-8 text.
size_t shown_columns(const std::string& text) {
  const auto begins = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; };
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), begins));
}

std::string drawn_bar(double done, size_t width) {
  const auto filled = static_cast<size_t>(done * static_cast<double>(width));
  std::string bar;
  for (size_t i = 0; i < width; ++i) bar += i < filled ? "━" : "╌";
  return bar;
}

// The parts of a line, in the order in which they are read; those that are not known are empty.
struct BarFields {
  std::string bar, share, left, step, loss, validation, learning_rate, speed, norm;

  std::string line() const {
    std::string text;
    const char* separator = "";
    for (const auto* field :
         {&bar, &share, &left, &step, &loss, &validation, &learning_rate, &speed, &norm}) {
      if (field->empty()) continue;
      text += separator + *field;
      separator = field == &bar ? " " : "  ";  // the share is padded
    }
    return text;
  }
};

BarFields point_fields(const ProgressPoint& point, int64_t total_steps) {
  BarFields fields;
  const std::string end = total_steps > 0 ? with_thousands(total_steps) : "";
  std::string step = with_thousands(point.step);
  if (step.size() < end.size()) step.insert(0, end.size() - step.size(), ' ');
  fields.step = "step " + step + (end.empty() ? "" : " of " + end);
  if (point.loss) fields.loss = "loss " + fixed_text(*point.loss, 4);
  if (point.validation) fields.validation = "validation " + fixed_text(*point.validation, 4);
  if (point.learning_rate) fields.learning_rate = "lr " + short_text(*point.learning_rate, 3);
  if (point.tokens_per_second) fields.speed = short_count(*point.tokens_per_second) + " tokens/s";
  if (point.gradient_norm) fields.norm = "gradient norm " + short_text(*point.gradient_norm, 3);
  return fields;
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
      terminal_(can_redraw(out)),
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
  const std::optional<double> validation = point.validation ? point.validation : last_.validation;
  if (point.loss || !last_.loss) last_ = point;
  last_.validation = validation;
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

void ProgressBar::print(const std::string& line) {
  const bool redraw = line_open_;
  interrupt();
  put_text(line + "\n", out_);
  if (redraw) draw();
}

void ProgressBar::interrupt() {
  if (line_open_) put_text("\r\x1b[K", out_);
  line_open_ = false;
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
  return point_fields(point, total_steps_).line();
}

std::string ProgressBar::bar_line(const ProgressPoint& point, double seconds, size_t columns) const {
  BarFields fields = point_fields(point, total_steps_);
  const bool end_is_known = total_steps_ > 0 || total_tokens_ > 0;
  const double done = share(point.step, point.tokens);
  if (end_is_known) {
    fields.bar = drawn_bar(done, kLongBar);
    const std::string percent = fixed_text(100.0 * done, 0);
    fields.share = std::string(3 - std::min<size_t>(percent.size(), 3), ' ') + percent + " %";
    if (done > first_share_ && done < 1) {
      fields.left = duration_text(seconds * (1.0 - done) / (done - first_share_)) + " left";
    }
    if (shown_columns(fields.line()) > columns) fields.bar = drawn_bar(done, kShortBar);
  }
  for (std::string* field : {&fields.speed, &fields.norm, &fields.left, &fields.bar, &fields.learning_rate,
                             &fields.validation, &fields.share, &fields.step, &fields.loss}) {
    if (shown_columns(fields.line()) <= columns) break;
    field->clear();
  }
  return fields.line();
}

}  // namespace pacer
