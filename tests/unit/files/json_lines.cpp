// JSON lines: what is written, checked by a JSON parser that
// is not ours, and what happens when it cannot be written.
#include <cerrno>
#include <clocale>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <locale>
#include <sstream>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include <pacer/core/error.h>
#include <pacer/files/json_lines.h>

#include "support/catch.h"
#include "support/samples.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

constexpr const char* kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Decimal commas and thousands points everywhere, for C++
// streams; and for C where such a locale is installed.
class CommaLocale {
 public:
  CommaLocale() : c_(std::setlocale(LC_ALL, nullptr)) {
    struct Commas : std::numpunct<char> {
      char do_decimal_point() const override { return ','; }
      char do_thousands_sep() const override { return '.'; }
      std::string do_grouping() const override { return "\3"; }
    };
    std::locale::global(std::locale(std::locale::classic(), new Commas));
    for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "de_DE", "fr_FR.UTF-8"}) {
      if (std::setlocale(LC_ALL, name) != nullptr) break;
    }
  }
  ~CommaLocale() {
    std::locale::global(std::locale::classic());
    std::setlocale(LC_ALL, c_.c_str());
  }

 private:
  std::string c_;
};

uint64_t bits_of_double(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace

TEST_CASE("a line is one object with its keys in order", "[core][json]") {
  CHECK(JsonLine().str() == "{}");
  CHECK(JsonLine().add("step", 3).add("loss", 2.5).str() == R"({"step":3,"loss":2.5})");
  CHECK(JsonLine().add("z", "text").add("a", true).add("m", false).str() ==
        R"({"z":"text","a":true,"m":false})");
}

TEST_CASE("integers are written in full", "[core][json]") {
  CHECK(JsonLine().add("x", std::numeric_limits<int64_t>::min()).str() == R"({"x":-9223372036854775808})");
  CHECK(JsonLine().add("x", std::numeric_limits<uint64_t>::max()).str() == R"({"x":18446744073709551615})");
  CHECK(JsonLine().add("x", static_cast<uint8_t>(200)).str() == R"({"x":200})");
}

TEST_CASE("text is not taken for a truth value", "[core][json]") {
  const char* text = "false";
  CHECK(JsonLine().add("x", text).str() == R"({"x":"false"})");
  CHECK(JsonLine().add("x", std::string("y")).str() == R"({"x":"y"})");
}

TEST_CASE("every character of ASCII survives in a key and in a text", "[core][json]") {
  std::string all;
  for (int c = 0; c < 128; ++c) all += static_cast<char>(c);
  const std::string line = JsonLine().add(all, all).str();
  for (const char c : line) REQUIRE(static_cast<unsigned char>(c) >= 0x20);  // one line, whatever the text
  const auto parsed = nlohmann::json::parse(line);
  CHECK(parsed.at(all).get<std::string>() == all);
  CHECK(json_quote("a\"b\\c\nd\te") == R"("a\"b\\c\nd\u0009e")");
}

TEST_CASE("valid UTF-8 is kept as it is", "[core][json]") {
  // The first and last characters of every length and the neighbours of the surrogates.
  const std::string text =
      "\xC2\x80 \xDF\xBF \xE0\xA0\x80 \xED\x9F\xBF \xEE\x80\x80 \xEF\xBF\xBF \xF0\x90\x80\x80 "
      "\xF4\x8F\xBF\xBF";
  CHECK(json_quote(text) == '"' + text + '"');
  CHECK(nlohmann::json::parse(json_quote(text)).get<std::string>() == text);
}

TEST_CASE("bytes that are not UTF-8 become replacement characters", "[core][json]") {
  const auto replaced = [](int times) {
    std::string text;
    for (int i = 0; i < times; ++i) text += kReplacement;
    return '"' + text + '"';
  };
  CHECK(json_quote("\x80") == replaced(1));              // a continuation alone
  CHECK(json_quote("\xC3") == replaced(1));              // cut short
  CHECK(json_quote("\xE2\x82") == replaced(2));          // cut short
  CHECK(json_quote("\xC0\xAF") == replaced(2));          // overlong
  CHECK(json_quote("\xC1\xBF") == replaced(2));          // overlong
  CHECK(json_quote("\xE0\x9F\xBF") == replaced(3));      // overlong
  CHECK(json_quote("\xF0\x8F\xBF\xBF") == replaced(4));  // overlong
  CHECK(json_quote("\xED\xA0\x80") == replaced(3));      // a surrogate
  CHECK(json_quote("\xF4\x90\x80\x80") == replaced(4));  // beyond U+10FFFF
  CHECK(json_quote("\xF5\x80\x80\x80") == replaced(4));
  CHECK(json_quote("\xFF") == replaced(1));
  CHECK(json_quote("\xC3(") == std::string("\"") + kReplacement + "(\"");  // what follows is not swallowed
}

TEST_CASE("random bytes always become valid JSON", "[core][json]") {
  Samples samples(1);
  for (int i = 0; i < 20000; ++i) {
    std::string text(static_cast<size_t>(samples.below(8)), ' ');
    for (char& c : text)
      c = static_cast<char>(samples.chance(0.5) ? 0x80 + samples.below(128) : samples.below(256));
    REQUIRE(nlohmann::json::accept(JsonLine().add(text, text).str()));
  }
}

TEST_CASE("a hundred thousand numbers read back to the same bits", "[core][json]") {
  Samples samples(2);
  const auto read_back = [](double value) {
    const std::string line = JsonLine().add("x", value).str();
    return std::strtod(line.c_str() + std::strlen("{\"x\":"), nullptr);
  };
  int tried = 0, wrong = 0;
  while (tried < 100000) {
    double value;
    const uint64_t bits = samples.bits();
    std::memcpy(&value, &bits, sizeof value);
    if (!std::isfinite(value)) continue;
    ++tried;
    wrong += bits_of_double(read_back(value)) != bits;
  }
  CHECK(wrong == 0);
  using Limits = std::numeric_limits<double>;
  for (const double value :
       {0.0, -0.0, 1.0, 0.1, 1e22, -1e300, Limits::max(), Limits::min(), Limits::denorm_min()}) {
    CHECK(bits_of_double(read_back(value)) == bits_of_double(value));
    CHECK(nlohmann::json::accept(JsonLine().add("x", value).str()));
  }
}

TEST_CASE("a diverged value stays visible in valid JSON", "[core][json]") {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::string line = JsonLine().add("a", std::nan("")).add("b", kInfinity).add("c", -kInfinity).str();
  CHECK(line == R"({"a":"nan","b":"inf","c":"-inf"})");
}

TEST_CASE("a locale with decimal commas changes nothing", "[core][json]") {
  const CommaLocale commas;
  std::ostringstream proof;
  proof << 1234.5;
  REQUIRE(proof.str() == "1.234,5");
  CHECK(JsonLine().add("x", 1234.5).add("n", 1234567).str() == R"({"x":1234.5,"n":1234567})");
}

TEST_CASE("a repeated key is refused and named", "[core][json]") {
  JsonLine line;
  line.add("step", 1).add("ste", 2).add("tep", 3).add("step\n", 4);
  CHECK_THROWS_AS(line.add("step", 5), InvalidArgument);
  CHECK_THROWS_WITH(line.add("step", 0.5), ContainsSubstring("step"));
  CHECK_THROWS_AS(line.add("ste", "x"), InvalidArgument);
  CHECK_THROWS_AS(line.add("step\n", "x"), InvalidArgument);
  CHECK(line.str() == R"({"step":1,"ste":2,"tep":3,"step\n":4})");
  CHECK_NOTHROW(JsonLine().add("a", 1).add("b", "a").add("c", "\"b\""));  // values are no keys
  CHECK_NOTHROW(JsonLine().add("a\"b", 1).add("b", 2));                   // nor are parts of keys
  CHECK_THROWS_AS(JsonLine().add("", 1).add("", 2), InvalidArgument);
}

TEST_CASE("a file is truncated or continued as asked", "[core][json]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("log.jsonl");
  JsonLinesFile(path).write(JsonLine().add("n", 1));
  CHECK(content_of(path) == "{\"n\":1}\n");
  JsonLinesFile(path, JsonLinesFile::Mode::append).write(JsonLine().add("n", 2));
  CHECK(content_of(path) == "{\"n\":1}\n{\"n\":2}\n");
  JsonLinesFile(path, JsonLinesFile::Mode::truncate).write(JsonLine().add("n", 3));
  CHECK(content_of(path) == "{\"n\":3}\n");
}

TEST_CASE("a line has reached the operating system when write returns", "[core][json]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("log.jsonl");
  JsonLinesFile file(path);
  std::string expected;
  for (int i = 0; i < 3; ++i) {
    file.write(JsonLine().add("i", i));
    expected += "{\"i\":" + std::to_string(i) + "}\n";
    CHECK(content_of(path) == expected);
  }
}

TEST_CASE("a path that cannot be written is named with the reason", "[core][json]") {
  const TemporaryFolder folder;
  const std::string missing = folder.path("no/such/log.jsonl");
  CHECK_THROWS_AS(JsonLinesFile(missing), FileError);
  CHECK_THROWS_WITH(JsonLinesFile(missing),
                    ContainsSubstring(missing) && ContainsSubstring(std::strerror(ENOENT)));
  CHECK_THROWS_WITH(JsonLinesFile(folder.path("")), ContainsSubstring(std::strerror(EISDIR)));
}

TEST_CASE("a full disk is an error that names the path and the reason", "[core][json]") {
  if (!std::filesystem::exists("/dev/full")) PACER_SKIP("no /dev/full");
  const std::string no_space = std::strerror(ENOSPC);
  const std::string beyond_any_buffer(1 << 20, 'x');
  for (const std::string& text : {std::string("short"), beyond_any_buffer}) {
    const JsonLine line = JsonLine().add("text", text);
    CHECK_THROWS_AS(JsonLinesFile("/dev/full").write(line), FileError);
    JsonLinesFile file("/dev/full");
    errno = 0;  // the reason must be that of this write
    CHECK_THROWS_WITH(file.write(line), ContainsSubstring("/dev/full") && ContainsSubstring(no_space));
  }
}

}  // namespace pacer::testing
