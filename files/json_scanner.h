// Reads JSON of a known shape from text that nobody vouches for. The caller says what must come next, so
// there is no tree and no recursion: nesting beyond the shape asked for is an error like any other. Nothing
// is allocated; strings are decoded where they stand. Values of unknown shape can be skipped, no more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <pacer/core/error.h>

namespace pacer {

// What a message may show of a name found in a file: quoted, and cut after 80 bytes.
std::string quote_for_message(std::string_view name);

// An object of known keys is read as
//   scanner.expect('{');
//   scanner.expect_key("step");  step = scanner.integer();  scanner.expect('}');
// and one of unknown keys as
//   scanner.expect('{');
//   if (scanner.take('}')) return;
//   do { key = scanner.string(); scanner.expect(':'); ... } while (scanner.more('}'));
// Every function throws FileError where the text goes on otherwise; white space between tokens is skipped.
class JsonScanner {
 public:
  // Messages open with `what` and count bytes from `first_byte`. The text must stay, and its strings with
  // escapes are overwritten by what they mean, which is never longer.
  JsonScanner(char* text, size_t bytes, size_t first_byte, std::string what)
      : begin_(text), at_(text), end_(text + bytes), first_byte_(first_byte), what_(std::move(what)) {}

  // Consumes the character if it comes next.
  bool take(char c);
  void expect(char c) {
    if (at_ == end_ || *at_ != c) return expect_behind_space(c);
    ++at_;  // nearly always, and headers of a million tensors have millions of these
  }
  // Between the items of a list or object: true after a comma, false after `close`.
  bool more(char close) {
    if (at_ == end_ || *at_ != ',') return more_behind_space(close);
    ++at_;
    return true;
  }
  void expect_key(std::string_view key);
  // Nothing but white space follows.
  void expect_end();

  // A string without its quotes, in valid UTF-8; the view points into the text.
  std::string_view string();
  // Reads an integer from 0 to 2^63 - 1, without fraction, exponent or leading zeros.
  int64_t integer();
  // Reads any number of JSON, rounded to the nearest fp64. Numbers beyond fp64's range are refused, as are
  // those that it would round to 0; NaN and infinities are not JSON.
  double number();
  bool boolean();
  // Consumes a null if it comes next.
  bool take_null();
  // The first character of the value that comes next, which stays; NUL at the end of the text.
  char peek();
  // Passes over one value of whatever shape, which is checked as the other functions do. Lists and objects
  // may be nested kDeepest deep.
  void skip_value();
  static constexpr size_t kDeepest = 64;

  // The position of the next byte, counted from the start of the text.
  size_t position() const { return static_cast<size_t>(at_ - begin_); }

  // FileError at a position of the text.
  template <class... Parts>
  [[noreturn]] void fail_at(size_t position, const Parts&... parts) const {
    throw FileError(detail::concatenate(what_, ", byte ", first_byte_ + position, ": ", parts...));
  }

 private:
  void skip_space();
  void expect_behind_space(char c);
  bool more_behind_space(char close);
  bool take_word(std::string_view word);
  void skip_scalar();
  size_t digits();
  char* skip_plain(char* at) const;
  char* decode_escape(char* out);
  uint32_t hex_digits();

  char* begin_;
  char* at_;
  char* end_;
  size_t first_byte_;
  std::string what_;
};

}  // namespace pacer
