// The progress bar: its plain lines, and what a terminal gets, read from the other end of a pseudo-terminal.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <pacer/files/number_text.h>
#include <pacer/metrics/progress_bar.h>

#include "support/catch.h"

namespace pacer::testing {
namespace {

struct CloseProgressFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using ProgressFile = std::unique_ptr<std::FILE, CloseProgressFile>;

ProgressPoint progress_point_at(int64_t step) {
  ProgressPoint point;
  point.step = step;
  point.tokens = 100 * step;
  point.loss = 2.34567;
  point.learning_rate = 3e-4;
  point.tokens_per_second = 12345;
  point.gradient_norm = 0.8125;
  return point;
}

constexpr const char* kFacts = "  loss 2.3457  lr 0.0003  12.3k tokens/s  gradient norm 0.812";

size_t shown_characters(const std::string& text) {
  size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
  return count;
}

}  // namespace

TEST_CASE("a file gets one plain line per point", "[schedulers][progress]") {
  const ProgressFile file(std::tmpfile());
  {
    ProgressBar bar(1000, 0, file.get());
    bar.begin(0, 0);
    bar.show(progress_point_at(20));
    bar.show({});
    bar.finish();
  }
  std::rewind(file.get());
  std::string text(400, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  CHECK(text == "step    20 of 1,000" + std::string(kFacts) + "\nstep     0 of 1,000\n");
  CHECK(ProgressBar().plain_line(progress_point_at(1234567)) == "step 1,234,567" + std::string(kFacts));
}

TEST_CASE("the bar says how much is done and how long the rest takes", "[schedulers][progress]") {
  const auto times = [](int count, const std::string& text) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  };
  ProgressBar bar(1000);
  bar.begin(200, 20'000);  // a resumed run: its speed is that of its own steps
  const std::string facts = "step   400 of 1,000" + std::string(kFacts);
  CHECK(bar.bar_line(progress_point_at(400), 60, 200) ==
        times(9, "━") + times(15, "╌") + "  40 %  3 min 00 s left  " + facts);
  CHECK(bar.bar_line(progress_point_at(200), 0, 200).find("left") == std::string::npos);
  CHECK(bar.bar_line(progress_point_at(2000), 60, 200).rfind(times(24, "━") + " 100 %  step", 0) == 0);
  CHECK(ProgressBar(1000, 50'000)
            .bar_line(progress_point_at(250), 60, 200)
            .rfind(times(12, "━") + times(12, "╌") + "  50 %", 0) == 0);
  CHECK(ProgressBar().bar_line(progress_point_at(7), 60, 200) == "step 7" + std::string(kFacts));
}

TEST_CASE("a narrow terminal loses whole fields, the loss last", "[schedulers][progress]") {
  ProgressBar bar(1000);
  bar.begin(200, 20'000);
  ProgressPoint point = progress_point_at(400);
  point.validation = 2.5;
  const std::vector<std::string> expected = {
      "━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌  40 %  3 min 00 s left  step   400 of 1,000  loss 2.3457  validation 2.5000  "
      "lr 0.0003  12.3k tokens/s  gradient norm 0.812",
      "━━━━╌╌╌╌╌╌  40 %  3 min 00 s left  step   400 of 1,000  loss 2.3457  validation 2.5000  lr 0.0003  "
      "12.3k tokens/s  gradient norm 0.812",
      "━━━━╌╌╌╌╌╌  40 %  3 min 00 s left  step   400 of 1,000  loss 2.3457  validation 2.5000  lr 0.0003  "
      "gradient norm 0.812",
      "━━━━╌╌╌╌╌╌  40 %  3 min 00 s left  step   400 of 1,000  loss 2.3457  validation 2.5000  lr 0.0003",
      "━━━━╌╌╌╌╌╌  40 %  step   400 of 1,000  loss 2.3457  validation 2.5000  lr 0.0003",
      " 40 %  step   400 of 1,000  loss 2.3457  validation 2.5000  lr 0.0003",
      " 40 %  step   400 of 1,000  loss 2.3457  validation 2.5000",
      " 40 %  step   400 of 1,000  loss 2.3457",
      "step   400 of 1,000  loss 2.3457",
      "loss 2.3457",
      ""};
  size_t which = 0;
  for (size_t columns = 200; columns + 1 > 0; --columns) {
    const std::string line = bar.bar_line(point, 60, columns);
    CAPTURE(columns, line);
    while (which + 1 < expected.size() && shown_characters(expected[which]) > columns) ++which;
    REQUIRE(line == expected[which]);
  }
  CHECK(which + 1 == expected.size());
}

namespace {

// Both ends of a pseudo-terminal; null where there are none here.
struct Terminal {
  explicit Terminal(unsigned short columns = 110) {
    const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) return;
    screen.reset(fdopen(master, "r"));
    program.reset(std::fopen(ptsname(master), "we"));
    winsize size{};
    size.ws_row = 24;
    size.ws_col = columns;
    ioctl(master, TIOCSWINSZ, &size);
  }
  // All that was written, up to the mark that this writes behind it.
  std::string text() const {
    std::fputs("<end>", program.get());
    std::fflush(program.get());
    std::string text;
    while (text.find("<end>") == std::string::npos) {
      char piece[4096];
      const ssize_t count = read(fileno(screen.get()), piece, sizeof piece);
      REQUIRE(count > 0);
      text.append(piece, static_cast<size_t>(count));
    }
    return text.substr(0, text.find("<end>"));
  }
  ProgressFile screen, program;
};

// While it lives, TERM has this value.
class TerminalName {
 public:
  explicit TerminalName(const char* name) {
    if (const char* before = std::getenv("TERM")) before_ = before;
    setenv("TERM", name, 1);
  }
  ~TerminalName() { before_ ? setenv("TERM", before_->c_str(), 1) : unsetenv("TERM"); }
  TerminalName(const TerminalName&) = delete;

 private:
  std::optional<std::string> before_;
};

}  // namespace

TEST_CASE("a line of the program's own comes above the bar, which is drawn again", "[schedulers][progress]") {
  const TerminalName name("xterm");
  const Terminal terminal;
  if (!terminal.program) PACER_SKIP("no pseudo-terminals here");
  ProgressBar bar(1000, 0, terminal.program.get());
  bar.print("before the bar");
  bar.show(progress_point_at(7));
  bar.print("a note");
  const std::string text = terminal.text();
  CHECK(text.rfind("before the bar\r\n\r", 0) == 0);
  const size_t note = text.find("\r\x1b[Ka note\r\n");
  REQUIRE(note != std::string::npos);
  CHECK(text.find("step     7 of 1,000") < note);
  CHECK(text.find("step     7 of 1,000", note) != std::string::npos);
  bar.interrupt();
  CHECK(terminal.text() == "\r\x1b[K");
}

TEST_CASE("a terminal without a cursor to move gets plain lines", "[schedulers][progress]") {
  const TerminalName name("dumb");
  const Terminal terminal;
  if (!terminal.program) PACER_SKIP("no pseudo-terminals here");
  ProgressBar bar(1000, 0, terminal.program.get());
  bar.show(progress_point_at(7));
  bar.print("a note");
  bar.show(progress_point_at(8));
  bar.finish();
  CHECK(terminal.text() == "step     7 of 1,000" + std::string(kFacts) + "\r\na note\r\nstep     8 of 1,000" +
                               std::string(kFacts) + "\r\n");
}

TEST_CASE("a terminal goes on showing what validation found", "[schedulers][progress]") {
  const TerminalName name("xterm");
  const Terminal terminal(200);
  if (!terminal.program) PACER_SKIP("no pseudo-terminals here");
  ProgressBar bar(1000, 0, terminal.program.get());
  ProgressPoint found;  // as it comes after the last step: with a value, without a loss
  found.step = 7;
  found.validation = 2.25;
  bar.show(progress_point_at(7));
  bar.show(found);
  bar.finish();
  const std::string text = terminal.text();
  const std::string last = text.substr(text.rfind("step"));
  CHECK(last.find("loss 2.3457  validation 2.2500") != std::string::npos);
}

TEST_CASE("a terminal gets one line, drawn again, with the last point", "[schedulers][progress]") {
  const TerminalName name("xterm");
  const Terminal terminal;
  if (!terminal.program) PACER_SKIP("no pseudo-terminals here");
  {
    ProgressBar bar(1000, 0, terminal.program.get());
    for (int64_t step = 1; step <= 50; ++step) bar.show(progress_point_at(step));
  }
  const std::string text = terminal.text();
  CHECK(text.front() == '\r');
  CHECK(text.find("step     1 of 1,000") != std::string::npos);
  CHECK(text.find("step    50 of 1,000") != std::string::npos);
  CHECK(std::count(text.begin(), text.end(), '\r') < 25);  // most came too soon after the one before
  CHECK(text.find('\n') == text.size() - 1);
  CHECK(shown_characters(text.substr(0, text.find('\x1b'))) <= 1 + 109);
}

TEST_CASE("numbers are written for people", "[schedulers][progress]") {
  CHECK(with_thousands(-1234567) == "-1,234,567");
  CHECK(with_thousands(999) == "999");
  CHECK(short_count(850) == "850");
  CHECK(short_count(1500) == "1.5k");
  CHECK(short_count(2'999'700) == "3M");
  CHECK(short_count(999.7) == "1k");
  CHECK(fixed_text(-NAN, 2) == "nan");
  CHECK(short_text(-INFINITY, 3) == "-inf");
  CHECK(short_text(2.5e-7, 3) == "2.5e-07");
  CHECK(duration_text(0.5) == "0.5 s");
  CHECK(duration_text(8.44) == "8.4 s");
  CHECK(duration_text(59.96) == "1 min 00 s");
  CHECK(duration_text(3840) == "1 h 04 min");
  CHECK(duration_text(INFINITY) == "unknown");
}

}  // namespace pacer::testing
