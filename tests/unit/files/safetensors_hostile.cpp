// Safetensors files that are damaged or meant to do harm: each is refused with a sentence that names the
// file, and none makes the reader allocate by what the file says of itself.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <pacer/core/error.h>
#include <pacer/files/name_hash.h>
#include <pacer/files/safetensors.h>

#include "support/catch.h"
#include "support/files/safetensors_text.h"
#include "support/message_of.h"
#include "support/samples.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

// The refusal of these bytes; empty where they are accepted.
std::string safetensors_refusal(const std::string& text) {
  return message_of<FileError>([&] { parsed_safetensors(text); });
}

std::string entry(const std::string& name, int64_t begin, int64_t end) {
  return '"' + name + R"(":{"dtype":"U8","shape":[)" + std::to_string(end - begin) + R"(],"data_offsets":[)" +
         std::to_string(begin) + ',' + std::to_string(end) + "]}";
}

struct HostileHeader {
  const char* header;
  size_t data;
  const char* part;  // of the message
};

}  // namespace

TEST_CASE("a header length that cannot be is refused", "[core][safetensors]") {
  const std::string whole = safetensors_text("{" + entry("a", 0, 4) + "}", 4);
  REQUIRE(safetensors_refusal(whole).empty());
  const uint64_t right = whole.size() - 8 - 4;
  for (const uint64_t length :
       {uint64_t{0}, uint64_t{1}, right - 8, right - 1, right + 1, right + 4, right + 5, uint64_t{1} << 31,
        uint64_t{1} << 32, uint64_t{1} << 63, (uint64_t{1} << 63) - 8, UINT64_MAX - 8, UINT64_MAX}) {
    CAPTURE(length);
    const std::string message = safetensors_refusal(little_endian_length(length) + whole.substr(8));
    CHECK_THAT(message, ContainsSubstring("some/file.safetensors, byte "));
    CHECK((message.find("cut short") != std::string::npos) == (length > right + 4));
  }
  for (size_t size = 0; size < 8; ++size) {
    CHECK_THAT(safetensors_refusal(whole.substr(0, size)), ContainsSubstring("some/file.safetensors"));
  }
  const auto limit = static_cast<size_t>(kMaxSafetensorsHeader);
  CHECK_THAT(safetensors_refusal(little_endian_length(limit + 8) + "{}" + std::string(limit + 6, ' ')),
             ContainsSubstring("limit"));
  CHECK(safetensors_refusal(little_endian_length(limit) + "{}" + std::string(limit - 2, ' ')).empty());
}

TEST_CASE("a header that is not as the format has it is refused by byte and tensor", "[core][safetensors]") {
  const HostileHeader cases[] = {
      // Places.
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
       6, "\"b\" overlaps"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       4, "overlaps"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[5,7]}})",
       7, "\"b\" leaves a gap"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", 5, "\"a\" leaves a gap"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
       R"("b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
       4, "overlaps"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 5, "1 bytes follow the last tensor"},
      {"{}", 1, "1 bytes follow the last tensor"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 3, "\"a\" has the bytes 0 to 4 of 3"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}})", 4, "\"a\" has the bytes 4 to 0"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,9223372036854775807]}})", 4,
       "\"a\" has the bytes"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,9223372036854775808]}})", 4, "2^63"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[-4,0]}})", 4, "whole number"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0.0,4]}})", 4, "expected"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0]}})", 4, "expected"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,4]}})", 4, "expected"},
      // Sizes.
      {R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,4]}})", 4, "\"a\" has 4 bytes, but"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "\"a\" has 4 bytes, but"},
      {R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,0]}})", 0, "\"a\" has 0 bytes, but"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}})", 4,
       "\"a\" has 4 bytes, but"},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
       "2^63 - 1 elements"},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", 0,
       "2^63 - 1 elements"},
      {R"({"a":{"dtype":"U8","shape":[18446744073709551617],"data_offsets":[0,1]}})", 1, "2^63"},
      {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "whole number"},
      {R"({"a":{"dtype":"U8","shape":[1,],"data_offsets":[0,1]}})", 1, "whole number"},
      {R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1, "whole number"},
      // Alignment: F32 after one byte.
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
       5, "\"b\" starts at byte"},
      // Dtypes and fields.
      {R"({"a":{"dtype":"","shape":[1],"data_offsets":[0,4]}})", 4, "dtype"},
      {R"({"a":{"dtype":1,"shape":[1],"data_offsets":[0,4]}})", 4, "expected"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}})", 1, "unknown field \"more\""},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, "\"dtype\" twice"},
      {R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1, "\"shape\" twice"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"data_offsets":[0,1]}})", 1,
       "\"data_offsets\" twice"},
      {R"({"a":{"dtype":"U8","shape":[1]}})", 1, "\"a\" lacks"},
      {R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, "\"a\" lacks"},
      {R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, "\"a\" lacks"},
      {R"({"a":{}})", 0, "expected"},
      // Names.
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "\"a\" occurs twice"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("\u0061":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}})",
       1, "\"a\" occurs twice"},
      {R"({"a\u0000b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, "NUL"},
      {"{\"\xFF\":{}}", 0, "UTF-8"},
      {"{\"\xED\xA0\x80\":{}}", 0, "UTF-8"},
      {R"({"\ud800":{}})", 0, "surrogate"},
      // Metadata.
      {R"({"__metadata__":{"a":"b"},"__metadata__":{}})", 0, "second"},
      {R"({"__metadata__":{"a":"b","a":"b"}})", 0, "\"a\" occurs twice"},
      {R"({"__metadata__":{"a":1}})", 0, "expected"},
      {R"({"__metadata__":{"a":{"b":"c"}}})", 0, "expected"},
      {R"({"__metadata__":[]})", 0, "expected"},
      // Not an object, or more than one.
      {"[]", 0, "does not start with '{'"},
      {" {}", 0, "does not start with '{'"},
      {"{}{}", 0, "more text follows"},
      {"{},", 0, "more text follows"},
      {"{", 0, "expected"},
      {"{\"a\"", 0, "expected"},
      {"{\"a", 0, "ends inside a string"},
      {"{\"a\\", 0, "escape"},
      {"{a:1}", 0, "expected"},
      {R"({"a":null})", 0, "expected"},
      {R"({"a":[]})", 0, "expected"},
  };
  for (const auto& [header, data, part] : cases) {
    CAPTURE(header, data);
    const std::string message = safetensors_refusal(safetensors_text(header, data));
    CHECK_THAT(message, ContainsSubstring("some/file.safetensors, byte ") && ContainsSubstring(part));
  }
}

TEST_CASE("nesting is refused at its first level, however deep", "[core][safetensors]") {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string deep;
    for (int i = 0; i < 1000000; ++i) deep += open;
    CHECK_THAT(safetensors_refusal(safetensors_text("{\"a\":" + deep, 0)), ContainsSubstring("byte "));
    CHECK_THAT(safetensors_refusal(safetensors_text(R"({"a":{"shape":[)" + deep, 0)),
               ContainsSubstring("byte "));
  }
}

TEST_CASE("a path as a tensor's name is a name like any other", "[core][safetensors]") {
  const SafetensorsFile file = parsed_safetensors(safetensors_text("{" + entry("../x", 0, 4) + "}", 4));
  CHECK(file.find("../x")->bytes == 4);
}

TEST_CASE("very many tensors are read, and refused when two of them are one", "[core][safetensors]") {
  // Time that grows with the square of their number would show even so.
  const int kTensors = wants_long_tests() ? 1000000 : 200000;
  std::string header = "{";
  for (int i = 0; i < kTensors; ++i)
    header += entry(std::to_string(i), i, i + 1) + (i + 1 < kTensors ? "," : "}");
  CHECK(parsed_safetensors(safetensors_text(header, kTensors)).names().size() ==
        static_cast<size_t>(kTensors));
  header.back() = ',';
  header += entry("100000", kTensors, kTensors + 1) + "}";
  CHECK_THAT(safetensors_refusal(safetensors_text(header, kTensors + 1)),
             ContainsSubstring("\"100000\" occurs twice"));
}

TEST_CASE("names of one hash are told apart", "[core][safetensors]") {
  std::map<uint32_t, std::string> name_of_hash;
  std::string first, second;
  for (int i = 0; second.empty(); ++i) {
    const std::string name = "layer." + std::to_string(i);
    const auto [other, is_new] = name_of_hash.emplace(name_hash(name), name);
    if (!is_new) first = other->second, second = name;
  }
  CAPTURE(first, second);
  const std::string two = entry(second, 0, 3) + ',' + entry(first, 3, 8);
  const SafetensorsFile file = parsed_safetensors(safetensors_text('{' + two + '}', 8));
  CHECK(file.names() == std::vector<std::string_view>{first, second});
  CHECK(file.names_in_file_order() == std::vector<std::string_view>{second, first});
  CHECK(file.find(first)->bytes == 5);
  CHECK(file.find(second)->bytes == 3);
  CHECK_FALSE(file.find("layer."));
  CHECK_THAT(safetensors_refusal(safetensors_text('{' + two + ',' + entry(first, 8, 9) + '}', 9)),
             ContainsSubstring('"' + first + "\" occurs twice"));
}

TEST_CASE("a shape of too many dimensions is refused", "[core][safetensors]") {
  const auto with_dimensions = [](size_t count) {
    std::string shape = "1";
    for (size_t i = 1; i < count; ++i) shape += ",1";
    return safetensors_text(R"({"a":{"dtype":"U8","shape":[)" + shape + R"(],"data_offsets":[0,1]}})", 1);
  };
  CHECK(parsed_safetensors(with_dimensions(kMaxSafetensorsDimensions)).find("a")->shape.size() ==
        kMaxSafetensorsDimensions);
  CHECK_THAT(safetensors_refusal(with_dimensions(kMaxSafetensorsDimensions + 1)),
             ContainsSubstring("\"a\" has more than 1000 dimensions"));
  const char element = 0;
  TensorBytes tensor{"a", Dtype::U8, std::vector<int64_t>(kMaxSafetensorsDimensions + 1, 1), &element};
  CHECK_THROWS_WITH(written_safetensors({tensor}), ContainsSubstring("the limit is 1000"));
}

TEST_CASE("too many entries of metadata are refused", "[core][safetensors]") {
  std::string header = "{\"__metadata__\":{";
  for (size_t i = 0; i <= kMaxSafetensorsMetadata; ++i)
    header += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":\"\"";
  CHECK_THAT(safetensors_refusal(safetensors_text(header + "}}", 0)), ContainsSubstring("metadata"));
}

}  // namespace pacer::testing
