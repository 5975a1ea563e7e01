#include <pacer/files/json_lines.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>

#include <pacer/core/error.h>
#include <pacer/files/file_descriptor.h>
#include <pacer/files/utf8.h>

namespace pacer {

std::string json_quote(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string quoted = "\"";
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    const size_t length = utf8_sequence_length(text.substr(i));
    if (length == 0) {
      quoted += "\xEF\xBF\xBD";  // U+FFFD, the replacement character
    } else if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (c == '\n') {
      quoted += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      quoted += "\\u00";
      quoted += kHex[(c >> 4) & 15];
      quoted += kHex[c & 15];
    } else {
      quoted += text.substr(i, length);
    }
    i += length == 0 ? 1 : length;
  }
  return quoted + '"';
}

JsonLine& JsonLine::add(std::string_view key, double value) {
  if (std::isnan(value)) return add_text(key, "\"nan\"");
  if (std::isinf(value)) return add_text(key, value > 0 ? "\"inf\"" : "\"-inf\"");
  std::array<char, 32> digits;
  const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  return add_text(key, std::string_view(digits.data(), static_cast<size_t>(result.ptr - digits.data())));
}

JsonLine& JsonLine::add(std::string_view key, std::string_view value) {
  return add_text(key, json_quote(value));
}

JsonLine& JsonLine::add_text(std::string_view key, std::string_view text) {
  const std::string quoted = json_quote(key);
  require(keys_.find('\n' + quoted + '\n') == std::string::npos, "the key ", quoted,
          " was added twice to one JSON line");
  keys_ += quoted + '\n';
  if (!body_.empty()) body_ += ',';
  body_ += quoted;
  body_ += ':';
  body_ += text;
  return *this;
}

JsonLinesFile::JsonLinesFile(const std::string& path, Mode mode)
    : path_(path),
      file_(open_stream(path, mode == Mode::append ? StreamMode::append : StreamMode::truncate)) {
  require<FileError>(file_ != nullptr, "cannot open ", path, " for writing: ", std::strerror(errno));
}

void JsonLinesFile::write(const JsonLine& line) {
  const std::string text = line.str() + '\n';
  const bool written =
      std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() && std::fflush(file_.get()) == 0;
  const int error = errno;
  require<FileError>(written, "cannot write to ", path_, ": ", std::strerror(error));
}

}  // namespace pacer
