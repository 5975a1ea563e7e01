// The JSON writer: nesting and layouts, read back by a JSON parser that is not ours. How text and numbers are
// written is tested with JSON lines.
#include <cmath>
#include <limits>
#include <string>

#include <nlohmann/json.hpp>

#include <pacer/core/error.h>
#include <pacer/files/json_writer.h>

#include "support/catch.h"
#include "support/samples.h"

namespace pacer::testing {
namespace {

constexpr JsonLayout kJsonLayouts[] = {JsonLayout::compact, JsonLayout::spaced, JsonLayout::lines};

// The same random value in both, up to `depth` containers deep.
void add_random_json(JsonWriter& json, nlohmann::ordered_json& wanted, Samples& samples, int depth) {
  const int64_t kind = samples.below(depth > 0 ? 7 : 5);
  if (kind == 0) {
    json.value(nullptr);
  } else if (kind == 1) {
    const bool yes = samples.chance(0.5);
    json.value(yes);
    wanted = yes;
  } else if (kind == 2) {
    const auto number = static_cast<int64_t>(samples.bits());
    json.value(number);
    wanted = number;
  } else if (kind == 3) {
    const double number = std::ldexp(static_cast<double>(samples.below(1 << 30)) + 0.5, -20);
    json.value(number);
    wanted = number;
  } else if (kind == 4) {
    std::string text(static_cast<size_t>(samples.below(6)), ' ');
    for (char& c : text) c = static_cast<char>(samples.below(128));
    json.value(text);
    wanted = text;
  } else if (kind == 5) {
    json.list(kJsonLayouts[samples.below(3)]);
    wanted = nlohmann::ordered_json::array();
    for (int64_t left = samples.below(4); left > 0; --left) {
      add_random_json(json, wanted.emplace_back(), samples, depth - 1);
    }
    json.end();
  } else {
    json.object(kJsonLayouts[samples.below(3)]);
    wanted = nlohmann::ordered_json::object();
    for (int64_t left = samples.below(4); left > 0; --left) {
      const std::string key = "\"\\key\n" + std::to_string(left);
      json.key(key);
      add_random_json(json, wanted[key], samples, depth - 1);
    }
    json.end();
  }
}

std::string nested_json(JsonLayout layout) {
  JsonWriter json;
  json.object(layout).add("a", 1).key("list").list(layout).value(2.5).value("x").value(nullptr).end();
  json.key("none").object(layout).end().key("empty").list(layout).end();
  return json.key("b").object(layout).add("c", true).end().end().text();
}

}  // namespace

TEST_CASE("objects and lists nest in each layout", "[core][json]") {
  CHECK(nested_json(JsonLayout::compact) ==
        R"({"a":1,"list":[2.5,"x",null],"none":{},"empty":[],"b":{"c":true}})");
  CHECK(nested_json(JsonLayout::spaced) ==
        R"({"a": 1, "list": [2.5, "x", null], "none": {}, "empty": [], "b": {"c": true}})");
  CHECK(nested_json(JsonLayout::lines) == R"({
  "a": 1,
  "list": [
    2.5,
    "x",
    null
  ],
  "none": {},
  "empty": [],
  "b": {
    "c": true
  }
})");
}

TEST_CASE("a layout is that of one object or list alone", "[core][json]") {
  JsonWriter json;
  json.object(JsonLayout::lines).key("files").list(JsonLayout::lines);
  for (const int i : {1, 2}) json.object(JsonLayout::spaced).add("name", "f").add("size", i).end();
  json.end().key("shape").list().value(3).value(4).end().end();
  CHECK(json.text() == R"({
  "files": [
    {"name": "f", "size": 1},
    {"name": "f", "size": 2}
  ],
  "shape": [3,4]
})");
}

TEST_CASE("a value may stand alone, and empty lists within one another", "[core][json]") {
  CHECK(JsonWriter().value("a\"b").text() == R"("a\"b")");
  CHECK(JsonWriter().value(false).text() == "false");
  for (const JsonLayout layout : kJsonLayouts) {
    CHECK(JsonWriter().list(layout).end().text() == "[]");
    CHECK(JsonWriter().object(layout).end().text() == "{}");
  }
  CHECK(JsonWriter().list().list().end().list().list().end().end().end().text() == "[[],[[]]]");
}

TEST_CASE("a value that is no number is a string, also in a list", "[core][json]") {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  CHECK(JsonWriter().list().value(-std::nan("")).value(kInfinity).value(-kInfinity).end().text() ==
        R"(["nan","inf","-inf"])");
}

TEST_CASE("keys and values are quoted", "[core][json]") {
  CHECK(JsonWriter().object().add("a\"\n", "b\\\x01").end().text() == R"({"a\"\n":"b\\\u0001"})");
}

TEST_CASE("what was written is what another reader reads", "[core][json]") {
  Samples samples(3);
  for (int i = 0; i < 2000; ++i) {
    JsonWriter json;
    nlohmann::ordered_json wanted;
    add_random_json(json, wanted, samples, /*depth=*/4);
    CAPTURE(json.text());
    REQUIRE(nlohmann::ordered_json::parse(json.text()) == wanted);
  }
}

TEST_CASE("a key or an end outside of objects is refused", "[core][json]") {
  CHECK_THROWS_AS(JsonWriter().end(), InvalidArgument);
  CHECK_THROWS_AS(JsonWriter().key("a"), InvalidArgument);
  CHECK_THROWS_AS(JsonWriter().list().end().end(), InvalidArgument);
}

}  // namespace pacer::testing
