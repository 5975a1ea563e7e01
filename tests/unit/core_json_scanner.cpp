// The scanner of JSON of a known shape, against nlohmann's parser for strings and numbers.
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include <pacer/core/json_lines.h>
#include <pacer/core/json_scanner.h>

#include "support/catch.h"
#include "support/samples.h"
#include "support/string_sink.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

// What `read` makes of the text; throws what the scanner throws.
template <class Read>
auto scanned(const std::string& text, const Read& read) {
  std::vector<char> bytes = as_bytes(text);
  JsonScanner scanner(bytes.data(), bytes.size(), 0, "file");
  auto value = read(scanner);
  scanner.expect_end();
  return value;
}
std::string scanned_string(const std::string& text) {
  return scanned(text, [](JsonScanner& scanner) { return std::string(scanner.string()); });
}
int64_t scanned_integer(const std::string& text) {
  return scanned(text, [](JsonScanner& scanner) { return scanner.integer(); });
}

}  // namespace

TEST_CASE("a scanned string is what another parser reads", "[core][json]") {
  for (const char* text :
       {R"("")", R"("plain")", R"("\"\\\/\b\f\n\r\t")", R"("\u0000\u007f\u0080\u07ff\u0800\uffff")",
        R"("\ud83d\ude00 \uDBFF\uDFFF\uE000")", R"("a\u00e9b\u20acc")", "\"\x7F\xC3\xA9\xF0\x9F\x98\x80\"",
        " \t\r\n\"spaced\" "}) {
    CAPTURE(text);
    CHECK(scanned_string(text) == nlohmann::json::parse(text).get<std::string>());
  }
}

TEST_CASE("random text is accepted as a string exactly when another parser accepts it", "[core][json]") {
  Samples samples(1);
  int accepted = 0;
  const char alphabet[] = {'\\', '"', 'u',  'd',    '8',    'D',    'c',
                           '0',  'n', '\n', '\x7F', '\xC3', '\xA9', '\xED'};
  for (int i = 0; i < 100000; ++i) {
    std::string text = "\"";
    if (samples.chance(0.3)) text += samples.chance(0.5) ? "\\ud8" : "\\u0";
    for (int64_t n = samples.below(8); n > 0; --n) text += samples.one_of(alphabet);
    text += '"';
    std::string mine, other;
    bool mine_accepts = true;
    try {
      mine = scanned_string(text);
    } catch (const FileError&) {
      mine_accepts = false;
    }
    const auto parsed = nlohmann::json::parse(text, nullptr, false);
    REQUIRE(mine_accepts == !parsed.is_discarded());
    if (!mine_accepts) continue;
    ++accepted;
    REQUIRE(mine == parsed.get<std::string>());
  }
  CHECK(accepted > 5000);
}

TEST_CASE("half a surrogate pair and bare control characters are refused in a string", "[core][json]") {
  for (const char* half : {R"("\ud83d")", R"("\ud83d\u0041")", R"("\ud83d\ud83d")", R"("\ud83d\n")",
                           R"("\ude00")", R"("\udbff\ue000")"}) {
    CAPTURE(half);
    CHECK_THROWS_AS(scanned_string(half), FileError);
  }
  for (int c = 0; c < 0x20; ++c) CHECK_THROWS_AS(scanned_string({'"', static_cast<char>(c), '"'}), FileError);
}

TEST_CASE("whole numbers from 0 to 2^63 - 1 are read, and nothing else is", "[core][json]") {
  CHECK(scanned_integer("0") == 0);
  CHECK(scanned_integer(" 10 ") == 10);
  CHECK(scanned_integer("9223372036854775807") == 9223372036854775807);
  for (const char* text : {"", "-1", "-0", "+1", "01", "00", "1.0", "1e3", "x", "9223372036854775808",
                           "18446744073709551616", "99999999999999999999999", "\"1\"", "null", "[1]"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(scanned_integer(text), FileError);
  }
}

TEST_CASE("the scanner names the byte at which the text is not what it should be", "[core][json]") {
  std::vector<char> bytes = as_bytes(R"({"a" : 1, "b": 2})");
  JsonScanner scanner(bytes.data(), bytes.size(), 100, "some/file");
  scanner.expect('{');
  scanner.expect_key("a");
  CHECK(scanner.integer() == 1);
  CHECK(scanner.more('}'));
  CHECK_THROWS_WITH(scanner.expect_key("c"),
                    ContainsSubstring("some/file, byte 110: ") && ContainsSubstring("\"c\""));
  CHECK_THROWS_WITH(scanner.expect('['), ContainsSubstring("byte 113: ") && ContainsSubstring("'['"));
  CHECK_THROWS_WITH(scanner.more('}'), ContainsSubstring("byte 113: "));
  CHECK_THROWS_WITH(scanner.expect_end(), ContainsSubstring("byte 113: "));
}

TEST_CASE("a name from a file is quoted and cut in a message", "[core][json]") {
  CHECK(quote_for_message("a\nb\"") == R"("a\nb\"")");
  CHECK(quote_for_message(std::string(80, 'x')) == '"' + std::string(80, 'x') + '"');
  CHECK(quote_for_message(std::string(81, 'x')) == '"' + std::string(80, 'x') + "\"...");
  // Not through the middle of a character.
  CHECK(quote_for_message(std::string(79, 'x') + "\xC3\xA9") == '"' + std::string(79, 'x') + "\"...");
}

}  // namespace pacer::testing
