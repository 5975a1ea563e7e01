// JSON lines: one JSON object per line, the format of every log pacer writes. A small writer, no parser.
// Numbers are written so that they read back to the same bits, whatever the locale. JSON has no words for NaN
// and infinities; they become the strings "nan", "inf" and "-inf", so that a diverged run stays visible.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>

namespace pacer {

// One object under construction:
//   JsonLine().add("step", 3).add("loss", 2.5).str() == R"({"step":3,"loss":2.5})"
// Keys keep the order in which they were added; a repeated key throws InvalidArgument.
class JsonLine {
 public:
  // Appends a key and its value.
  JsonLine& add(std::string_view key, double value);
  JsonLine& add(std::string_view key, std::string_view value);
  JsonLine& add(std::string_view key, const char* value) { return add(key, std::string_view(value)); }
  template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  JsonLine& add(std::string_view key, Integer value) {
    if constexpr (std::is_same_v<Integer, bool>) {
      return add_text(key, value ? "true" : "false");
    } else {
      return add_text(key, std::to_string(value));
    }
  }

  // The object without a line end.
  std::string str() const { return "{" + body_ + "}"; }

 private:
  JsonLine& add_text(std::string_view key, std::string_view text);

  std::string body_;
  std::string keys_ = "\n";  // every quoted key between line ends, to refuse repetition
};

// The text as a JSON string with its quotes; control characters and invalid UTF-8 are escaped or replaced.
std::string json_quote(std::string_view text);

// Appends lines to a file; each line reaches the operating system before write() returns.
class JsonLinesFile {
 public:
  // Whether a file that exists is emptied or continued.
  enum class Mode { truncate, append };

  // Throws FileError where the file cannot be opened.
  explicit JsonLinesFile(const std::string& path, Mode mode = Mode::truncate);

  // Throws FileError where the line cannot be written in full (a full disk, for example).
  void write(const JsonLine& line);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace pacer
