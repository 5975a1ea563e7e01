// JSON lines: one JSON object per line, the format of every log pacer writes. A small writer, no parser.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include <pacer/core/error.h>
#include <pacer/files/file_descriptor.h>
#include <pacer/files/json_writer.h>

namespace pacer {

// One object under construction:
//   JsonLine().add("step", 3).add("loss", 2.5).str() == R"({"step":3,"loss":2.5})"
// Keys keep the order in which they were added; a repeated key throws InvalidArgument.
class JsonLine {
 public:
  JsonLine() { object_.object(); }

  // Appends a key and its value, as JsonWriter writes it.
  template <class Value>
  JsonLine& add(std::string_view key, const Value& value) {
    const std::string quoted = json_quote(key);
    require(keys_.insert(quoted).second, "the key ", quoted, " was added twice to one JSON line");
    object_.add(key, value);
    return *this;
  }

  // The object without a line end.
  std::string str() const { return object_.text() + '}'; }

 private:
  JsonWriter object_;
  std::set<std::string> keys_;  // quoted
};

// Appends lines to a file; each line reaches the operating system before write() returns.
class JsonLinesFile {
 public:
  using Mode = StreamMode;

  // Throws FileError where the file cannot be opened.
  explicit JsonLinesFile(const std::string& path, Mode mode = Mode::truncate) : file_(path, mode) {}

  // Throws FileError where the line cannot be written in full (a full disk, for example).
  void write(const JsonLine& line) { file_.write(line.str() + '\n'); }

 private:
  OutputFile file_;
};

}  // namespace pacer
