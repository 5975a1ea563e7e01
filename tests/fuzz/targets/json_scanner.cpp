// The scanner itself: the first byte says which of its functions reads the rest. Strings and numbers are
// written again and read to the same.
#include <cstring>

#include <pacer/files/json_lines.h>
#include <pacer/files/json_scanner.h>
#include <pacer/files/utf8.h>

#include "fuzz/harness.h"
#include "support/files/scanned_json.h"

namespace pacer::fuzz {
namespace {

using testing::scanned;
using testing::scanned_number;
using testing::scanned_string;

void check_string(const std::string& text) {
  std::string value;
  if (!accepts(2 * text.size(), [&] { value = scanned_string(text); })) return;
  demand(is_utf8(value), "a string that was accepted is not UTF-8");
  demand(value.size() + 2 <= text.size(), "a string is longer than what it was read from");
  demand(scanned_string(json_quote(value)) == value, "a string differs after it was written and read again");
}

void check_number(const std::string& text) {
  double value = 0;
  if (!accepts(2 * text.size(), [&] { value = scanned_number(text); })) return;
  const std::string line = JsonLine().add("x", value).str();
  const double again = scanned_number(line.substr(5, line.size() - 6));
  demand(std::memcmp(&again, &value, sizeof value) == 0,
         "a number differs after it was written and read again");
}

void check_integer(const std::string& text) {
  int64_t value = 0;
  const auto read = [](JsonScanner& scanner) { return scanner.integer(); };
  if (!accepts(2 * text.size(), [&] { value = scanned(text, read); })) return;
  demand(value >= 0 && scanned(std::to_string(value), read) == value, "an integer is not what was written");
}

// What is skipped is a value between any two others.
void check_value(const std::string& text) {
  const auto skip = [](JsonScanner& scanner) {
    scanner.skip_value();
    return true;
  };
  if (!accepts(2 * text.size(), [&] { scanned(text, skip); })) return;
  scanned("[" + text + "," + text + "]", [](JsonScanner& scanner) {
    scanner.expect('[');
    scanner.skip_value();
    demand(scanner.more(']'), "a value reaches beyond its end");
    scanner.skip_value();
    demand(!scanner.more(']'), "a value reaches beyond its end");
    return true;
  });
}

}  // namespace

std::vector<std::string> seeds() {
  return {R"(s"plain \"\\\/\b\f\n\r\t \u00e9\ud83d\ude00")",
          "n-0.5e-300",
          "n1.7976931348623157e308",
          "n-0",
          "i9223372036854775807",
          R"(v{"a": [1, true, null, {"b": "c"}], "d": {}, "e": []})",
          "v" + std::string(64, '['),
          "v" + std::string(1'000'000, '[')};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string text = pacer::fuzz::text_of(data + 1, size - 1);
  switch (data[0]) {
    case 's':
      pacer::fuzz::check_string(text);
      break;
    case 'n':
      pacer::fuzz::check_number(text);
      break;
    case 'i':
      pacer::fuzz::check_integer(text);
      break;
    default:
      pacer::fuzz::check_value(text);
  }
  return 0;
}
