// Writes JSON: objects and lists within one another. Numbers are written so that they read back to the same
// bits, whatever the locale. JSON has no words for NaN and infinities; they become the strings "nan", "inf" and
// "-inf", so that a diverged run stays visible.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace pacer {

// The text as a JSON string with its quotes; control characters and invalid UTF-8 are escaped or replaced.
std::string json_quote(std::string_view text);

// How the elements of an object or a list are written.
enum class JsonLayout {
  compact,  // {"a":1,"b":2}
  spaced,   // {"a": 1, "b": 2}
  lines,    // each on a line of its own, two spaces further in than what it is in; {} where there are none
};

//   JsonWriter().object().add("step", 3).key("shape").list().value(2).value(4).end().end().text() ==
//       R"({"step":3,"shape":[2,4]})"
// Keys keep the order in which they were added; whether one is repeated is not looked at.
class JsonWriter {
 public:
  // Begins a value that has values of its own, up to end().
  JsonWriter& object(JsonLayout layout = JsonLayout::compact) { return begin('{', '}', layout); }
  JsonWriter& list(JsonLayout layout = JsonLayout::compact) { return begin('[', ']', layout); }
  // Ends the object or list that was begun last. Throws InvalidArgument where there is none.
  JsonWriter& end();

  // Appends the key of the next value, in an object.
  JsonWriter& key(std::string_view name);
  // Appends a value; nullptr is null.
  JsonWriter& value(double number);
  // The same with a fraction, 1.0, for readers that take no whole number.
  JsonWriter& real(double number);
  JsonWriter& value(std::string_view text) { return put(json_quote(text)); }
  JsonWriter& value(std::nullptr_t) { return put("null"); }
  template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  JsonWriter& value(Integer number) {
    if constexpr (std::is_same_v<Integer, bool>) {
      return put(number ? "true" : "false");
    } else {
      return put(std::to_string(number));
    }
  }
  // Appends a key and its value.
  template <class Value>
  JsonWriter& add(std::string_view name, const Value& of_key) {
    return key(name).value(of_key);
  }

  // Returns what was written so far; objects and lists that were not ended lack their end.
  const std::string& text() const { return text_; }

 private:
  struct Container {
    char closer;
    JsonLayout layout;
    bool is_empty;
  };
  JsonWriter& begin(char opener, char closer, JsonLayout layout);
  JsonWriter& put(std::string_view text);
  void separate();
  void begin_line();

  std::string text_;
  std::vector<Container> open_;  // the innermost is the last
  bool has_key_ = false;         // the next value belongs to the key that was written last
};

}  // namespace pacer
