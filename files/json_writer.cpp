#include <pacer/files/json_writer.h>

#include <cmath>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
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

JsonWriter& JsonWriter::end() {
  require(!open_.empty(), "JsonWriter has no object and no list that could end");
  const Container ended = open_.back();
  open_.pop_back();
  if (ended.layout == JsonLayout::lines && !ended.is_empty) begin_line();
  text_ += ended.closer;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  require(!open_.empty(), "JsonWriter has no object that the key ", json_quote(name), " could be in");
  put(json_quote(name));
  text_ += open_.back().layout == JsonLayout::compact ? ":" : ": ";
  has_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::value(double number) {
  const std::string text = exact_text(number);
  return put(std::isfinite(number) ? text : json_quote(text));
}

JsonWriter& JsonWriter::real(double number) {
  const std::string text = exact_text(number);
  const bool is_whole = text.find_first_not_of("-0123456789") == std::string::npos;
  return is_whole ? put(text + ".0") : value(number);
}

JsonWriter& JsonWriter::begin(char opener, char closer, JsonLayout layout) {
  put({&opener, 1});
  open_.push_back({closer, layout, /*is_empty=*/true});
  return *this;
}

JsonWriter& JsonWriter::put(std::string_view text) {
  separate();
  text_ += text;
  return *this;
}

// Writes what stands between an element and the one before it, or the beginning.
void JsonWriter::separate() {
  if (std::exchange(has_key_, false) || open_.empty()) return;
  Container& inside = open_.back();
  if (!std::exchange(inside.is_empty, false)) text_ += inside.layout == JsonLayout::spaced ? ", " : ",";
  if (inside.layout == JsonLayout::lines) begin_line();
}

void JsonWriter::begin_line() { text_.append(1, '\n').append(2 * open_.size(), ' '); }

}  // namespace pacer
