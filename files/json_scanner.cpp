#include <pacer/files/json_scanner.h>

#include <algorithm>
#include <bitset>
#include <charconv>
#include <cstring>
#include <limits>
#include <system_error>

#include <pacer/files/json_writer.h>
#include <pacer/files/utf8.h>

namespace pacer {
namespace {

// The character in UTF-8; returns the end of what was written.
char* put_utf8(uint32_t code, char* out) {
  const auto put = [&](uint32_t byte) { *out++ = static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
    return out;
  }
  if (code < 0x800) {
    put(0xC0 | (code >> 6));
  } else {
    if (code < 0x10000) {
      put(0xE0 | (code >> 12));
    } else {
      put(0xF0 | (code >> 18));
      put(0x80 | ((code >> 12) & 0x3F));
    }
    put(0x80 | ((code >> 6) & 0x3F));
  }
  put(0x80 | (code & 0x3F));
  return out;
}

}  // namespace

std::string quote_for_message(std::string_view name) {
  constexpr size_t kLongest = 80;
  if (name.size() <= kLongest) return json_quote(name);
  size_t cut = kLongest;
  while (cut > kLongest - 4 && (static_cast<unsigned char>(name[cut]) & 0xC0) == 0x80) --cut;
  return json_quote(name.substr(0, cut)) + "...";
}

void JsonScanner::skip_space() {
  while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
}

bool JsonScanner::take(char c) {
  skip_space();
  if (at_ == end_ || *at_ != c) return false;
  ++at_;
  return true;
}

void JsonScanner::expect_behind_space(char c) {
  if (!take(c)) fail_at(position(), "expected '", c, "'", at_ == end_ ? " but the text ends" : "");
}

bool JsonScanner::more_behind_space(char close) {
  if (take(',')) return true;
  if (!take(close)) fail_at(position(), "expected ',' or '", close, "'");
  return false;
}

void JsonScanner::expect_key(std::string_view key) {
  skip_space();
  const size_t start = position();
  if (string() != key) fail_at(start, "expected the field \"", key, "\"");
  expect(':');
}

void JsonScanner::expect_end() {
  skip_space();
  if (at_ != end_) fail_at(position(), "more text follows where it should end");
}

int64_t JsonScanner::integer() {
  skip_space();
  const size_t start = position();
  const bool leading_zero = at_ != end_ && *at_ == '0';
  int64_t value = 0;
  // So many digits are below 2^63, whatever they are.
  constexpr ptrdiff_t kSafeDigits = 18;
  const char* const safe_end = at_ + std::min(kSafeDigits, end_ - at_);
  for (; at_ != safe_end && '0' <= *at_ && *at_ <= '9'; ++at_) value = value * 10 + (*at_ - '0');
  for (; at_ != end_ && '0' <= *at_ && *at_ <= '9'; ++at_) {
    const int digit = *at_ - '0';
    if (value > (std::numeric_limits<int64_t>::max() - digit) / 10)
      fail_at(start, "the number exceeds 2^63 - 1");
    value = value * 10 + digit;
  }
  const size_t digits = position() - start;
  if (digits == 0 || (leading_zero && digits > 1)) fail_at(start, "expected a whole number from 0 on");
  return value;
}

// How many digits come next, which are consumed.
size_t JsonScanner::digits() {
  const size_t start = position();
  while (at_ != end_ && '0' <= *at_ && *at_ <= '9') ++at_;
  return position() - start;
}

double JsonScanner::number() {
  skip_space();
  const size_t start = position();
  const auto next_is = [&](const char* characters) {
    return at_ != end_ && *at_ != '\0' && std::strchr(characters, *at_) != nullptr;
  };
  if (next_is("-")) ++at_;
  const bool leading_zero = next_is("0");
  const size_t whole = digits();
  bool is_number = whole > 0 && (whole == 1 || !leading_zero);
  if (is_number && next_is(".")) {
    ++at_;
    is_number = digits() > 0;
  }
  if (is_number && next_is("eE")) {
    ++at_;
    if (next_is("+-")) ++at_;
    is_number = digits() > 0;
  }
  if (!is_number) fail_at(start, "expected a number");
  double value = 0;
  const auto result = std::from_chars(begin_ + start, at_, value);
  if (result.ec != std::errc()) fail_at(start, "the number is outside the range of 64-bit floats");
  return value;
}

bool JsonScanner::take_word(std::string_view word) {
  skip_space();
  if (std::string_view(at_, static_cast<size_t>(end_ - at_)).substr(0, word.size()) != word) return false;
  at_ += word.size();
  return true;
}

bool JsonScanner::boolean() {
  if (take_word("true")) return true;
  if (!take_word("false")) fail_at(position(), "expected true or false");
  return false;
}

bool JsonScanner::take_null() { return take_word("null"); }

char JsonScanner::peek() {
  skip_space();
  return at_ == end_ ? '\0' : *at_;
}

// A value that is no list and no object.
void JsonScanner::skip_scalar() {
  const char first = peek();
  if (first == '"') {
    string();
  } else if (first == 't' || first == 'f') {
    boolean();
  } else if (first == '-' || ('0' <= first && first <= '9')) {
    number();
  } else if (!take_null()) {
    fail_at(position(), "expected a value");
  }
}

void JsonScanner::skip_value() {
  std::bitset<kDeepest> is_object;  // of the lists and objects that are open, the outermost first
  size_t depth = 0;
  const auto expect_name = [&] {
    string();
    expect(':');
  };
  do {
    const char first = peek();
    if (first == '{' || first == '[') {
      if (depth == kDeepest)
        fail_at(position(), "lists and objects are nested more than ", kDeepest, " deep");
      const bool object = take('{');
      if (!object) expect('[');
      if (!take(object ? '}' : ']')) {
        is_object[depth++] = object;
        if (object) expect_name();
        continue;
      }
    } else {
      skip_scalar();
    }
    while (depth > 0) {
      const bool object = is_object[depth - 1];
      if (more(object ? '}' : ']')) {
        if (object) expect_name();
        break;
      }
      --depth;
    }
  } while (depth > 0);
}

// The first of eight bytes at a time that is a quote, a backslash, a control character or no ASCII, as far as
// eight at a time go: the characters before it mean themselves.
char* JsonScanner::skip_plain(char* at) const {
  constexpr uint64_t kOnes = 0x0101010101010101, kHighs = 0x8080808080808080;
  const auto has_zero = [](uint64_t word) { return (word - kOnes) & ~word & kHighs; };
  while (end_ - at >= 8) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    const uint64_t special = has_zero(word ^ (kOnes * '"')) | has_zero(word ^ (kOnes * '\\')) |
                             ((word - kOnes * 0x20) & ~word & kHighs) | (word & kHighs);
    if (special != 0) return at + __builtin_ctzll(special) / 8;
    at += 8;
  }
  return at;
}

std::string_view JsonScanner::string() {
  expect('"');
  const char* const start = at_;
  at_ = skip_plain(at_);
  char* out = at_;
  while (at_ != end_) {
    const char c = *at_;
    if (c == '"') {
      ++at_;
      return {start, static_cast<size_t>(out - start)};
    }
    if (c == '\\') {
      out = decode_escape(out);
      continue;
    }
    if (static_cast<unsigned char>(c) < 0x20) fail_at(position(), "a control character inside a string");
    const size_t length = utf8_sequence_length({at_, static_cast<size_t>(end_ - at_)});
    if (length == 0) fail_at(position(), "a string that is not UTF-8");
    if (out != at_) std::memmove(out, at_, length);
    out += length;
    at_ += length;
  }
  fail_at(position(), "the text ends inside a string");
}

// At a backslash; returns the end of what it was decoded to, which never lies beyond the escape itself.
char* JsonScanner::decode_escape(char* out) {
  constexpr char kNames[] = "\"\\/bfnrt";
  constexpr char kMeanings[] = "\"\\/\b\f\n\r\t";
  const size_t start = position();
  ++at_;
  if (at_ == end_) fail_at(start, "the text ends inside a string");
  const char name = *at_++;
  if (name != 'u') {
    const char* found = name == '\0' ? nullptr : std::strchr(kNames, name);
    if (found == nullptr) fail_at(start, "an unknown escape inside a string");
    *out++ = kMeanings[found - kNames];
    return out;
  }
  uint32_t code = hex_digits();
  if (code >= 0xD800 && code < 0xDC00) {
    if (end_ - at_ < 2 || at_[0] != '\\' || at_[1] != 'u') fail_at(start, "half a surrogate pair");
    at_ += 2;
    const uint32_t low = hex_digits();
    if (low < 0xDC00 || low > 0xDFFF) fail_at(start, "half a surrogate pair");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  } else if (code >= 0xDC00 && code <= 0xDFFF) {
    fail_at(start, "half a surrogate pair");
  }
  return put_utf8(code, out);
}

uint32_t JsonScanner::hex_digits() {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    const char c = at_ == end_ ? '\0' : *at_;
    const int digit = '0' <= c && c <= '9'   ? c - '0'
                      : 'a' <= c && c <= 'f' ? c - 'a' + 10
                      : 'A' <= c && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) fail_at(position(), "expected four hexadecimal digits");
    value = value * 16 + static_cast<uint32_t>(digit);
  }
  return value;
}

}  // namespace pacer
