// Safetensors: what is written reads back, by this reader and as JSON by another; what cannot be written is
// refused. Bad files are in core_safetensors_hostile.cpp.
#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include <nlohmann/json.hpp>

#include <pacer/core/error.h>
#include <pacer/files/safetensors.h>

#include "support/catch.h"
#include "support/files/memory_file_system.h"
#include "support/files/safetensors_text.h"
#include "support/files/string_sink.h"
#include "support/message_of.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

constexpr Dtype kAllDtypes[] = {Dtype::F64,         Dtype::F32,         Dtype::F16,     Dtype::BF16,
                                Dtype::I64,         Dtype::I32,         Dtype::I16,     Dtype::I8,
                                Dtype::U8,          Dtype::BOOL,        Dtype::U64,     Dtype::U32,
                                Dtype::U16,         Dtype::C64,         Dtype::F8_E4M3, Dtype::F8_E5M2,
                                Dtype::F8_E4M3FNUZ, Dtype::F8_E5M2FNUZ, Dtype::F8_E8M0};

// Bytes that differ from each other, as the data of tensors.
const std::string& some_tensor_data() {
  static const std::string data = [] {
    std::string text;
    for (int i = 0; i < 1000; ++i) text += static_cast<char>(i * 7 + i / 256);
    return text;
  }();
  return data;
}

uint64_t header_length(const std::string& file) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);  // on a little-endian machine
  return length;
}

}  // namespace

TEST_CASE("tensors of every dtype and shape come back to the byte", "[core][safetensors]") {
  const std::vector<std::vector<int64_t>> shapes = {{}, {1}, {3}, {2, 3}, {1, 1, 5}, {0}, {4, 0, 2}};
  std::vector<TensorBytes> tensors;
  for (const Dtype dtype : kAllDtypes) {
    for (const auto& shape : shapes) {
      const size_t count = tensors.size();
      tensors.push_back(
          {"t" + std::to_string(count * 37 % 1000), dtype, shape, some_tensor_data().data() + count});
    }
  }
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"", ""}, {"é\n\"", "x\\y"}};
  const SafetensorsFile file = parsed_safetensors(written_safetensors(tensors, metadata));
  const std::vector<std::string_view> names = file.names();
  CHECK(names.size() == tensors.size());
  CHECK(std::is_sorted(names.begin(), names.end()));
  for (const TensorBytes& tensor : tensors) {
    CAPTURE(tensor.name, dtype_name(tensor.dtype));
    const auto found = file.find(tensor.name);
    REQUIRE(found);
    CHECK(found->dtype == tensor.dtype);
    CHECK(found->shape == tensor.shape);
    auto bytes = static_cast<size_t>(dtype_bytes(tensor.dtype));
    for (const int64_t size : tensor.shape) bytes *= static_cast<size_t>(size);
    REQUIRE(found->bytes == bytes);
    CHECK(std::memcmp(found->data, tensor.data, bytes) == 0);
    CHECK(reinterpret_cast<uintptr_t>(found->data) % static_cast<size_t>(dtype_bytes(tensor.dtype)) == 0);
  }
  CHECK_FALSE(file.find("t"));
  CHECK_FALSE(file.find("zzz"));
  CHECK_FALSE(file.find("__metadata__"));
  const auto read = file.metadata();
  CHECK(std::map<std::string, std::string>(read.begin(), read.end()) == metadata);
}

TEST_CASE("a tensor of an unknown dtype is passed over", "[core][safetensors]") {
  const std::string header =
      R"({"b":{"shape":[2,3],"data_offsets":[0,3],"dtype":"F4"},"a":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})";
  const SafetensorsFile file = parsed_safetensors(safetensors_text(header, 5));
  const auto other = file.find("b"), known = file.find("a");
  REQUIRE(other);
  CHECK(other->dtype == Dtype::OTHER);
  CHECK(other->dtype_text == "F4");
  CHECK(other->shape.empty());
  CHECK(other->bytes == 3);
  REQUIRE(known);
  CHECK(known->dtype_text == "U8");
  CHECK(known->shape == std::vector<int64_t>{2});
  CHECK_THROWS_AS(written_safetensors({{"b", Dtype::OTHER, {1}, "x"}}), InvalidArgument);
}

TEST_CASE("the header is the JSON that the format describes", "[core][safetensors]") {
  const char* data = some_tensor_data().data();
  const std::string file = written_safetensors({{"b", Dtype::U8, {3}, data},
                                                {"z\"é", Dtype::F32, {2, 1}, data + 10},
                                                {"a", Dtype::BF16, {}, data + 20},
                                                {"c", Dtype::F32, {0}, nullptr}},
                                               {{"format", "pt"}});
  const uint64_t length = header_length(file);
  CHECK(length % 8 == 0);
  CHECK(nlohmann::json::parse(file.substr(8, length)) == nlohmann::json::parse(R"({
    "__metadata__": {"format": "pt"},
    "c": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
    "z\"é": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    "a": {"dtype": "BF16", "shape": [], "data_offsets": [8, 10]},
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [10, 13]}})"));
  CHECK(file.substr(8 + length) ==
        std::string(data + 10, 8) + std::string(data + 20, 2) + std::string(data, 3));
}

TEST_CASE("the order in which tensors are given does not change the file", "[core][safetensors]") {
  const char* data = some_tensor_data().data();
  const TensorBytes a{"a", Dtype::F32, {2}, data}, b{"b", Dtype::F32, {3}, data + 8},
      c{"c", Dtype::F64, {1}, data};
  CHECK(written_safetensors({a, b, c}) == written_safetensors({c, b, a}));
}

TEST_CASE("a file without tensors and metadata is a file", "[core][safetensors]") {
  CHECK(written_safetensors({}) == little_endian_length(8) + "{}      ");
  CHECK(parsed_safetensors(written_safetensors({})).names().empty());
  CHECK(parsed_safetensors(written_safetensors({}, {{"k", "v"}})).metadata().at("k") == "v");
}

TEST_CASE("what other writers may do is read", "[core][safetensors]") {
  // Any order, white space, escapes, metadata anywhere.
  const std::string header =
      "{ \"b\" :\n{\"data_offsets\":[ 4 , 8 ],\t\"shape\":[ 1 ,1 ],\"dtype\":\"F32\"},\r\n"
      "\"__metadata__\":{},\"\\u0061\\/\":{\"dtype\":\"F16\",\"data_offsets\":[0,4],\"shape\":[2]}} \n";
  const SafetensorsFile file = parsed_safetensors(safetensors_text(header, 8));
  CHECK(file.names() == std::vector<std::string_view>{"a/", "b"});
  CHECK(file.find("a/")->shape == std::vector<int64_t>{2});
  CHECK(file.find("b")->shape == std::vector<int64_t>{1, 1});
  CHECK(file.find("b")->data == file.find("a/")->data + 4);
}

TEST_CASE("views stay valid when the file is moved", "[core][safetensors]") {
  SafetensorsFile file = parsed_safetensors(written_safetensors({{"a", Dtype::U8, {3}, "xyz"}}));
  const TensorView before = *file.find("a");
  const SafetensorsFile moved = std::move(file);
  CHECK(moved.find("a")->data == before.data);
  CHECK(std::string(before.data, before.bytes) == "xyz");
}

TEST_CASE("what cannot be written is refused before the first byte", "[core][safetensors]") {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const char* data = some_tensor_data().data();
  const std::vector<std::pair<std::vector<TensorBytes>, std::string>> cases = {
      {{{"same", Dtype::F32, {1}, data}, {"x", Dtype::F32, {1}, data}, {"same", Dtype::U8, {1}, data}},
       "\"same\""},
      {{{std::string("nul\0x", 5), Dtype::F32, {1}, data}}, "nul"},
      {{{"\xFFnot", Dtype::F32, {1}, data}}, "not"},
      {{{"__metadata__", Dtype::F32, {1}, data}}, "__metadata__"},
      {{{"minus", Dtype::F32, {2, -1}, data}}, "\"minus\" has a dimension of size -1"},
      {{{"minus", Dtype::F32, {0, -1}, data}}, "\"minus\""},
      {{{"null", Dtype::F32, {2}, nullptr}}, "\"null\""},
      {{{"null", Dtype::F32, {}, nullptr}}, "\"null\""},
      {{{"huge", Dtype::F32, {kHuge / 4 + 1}, data}}, "\"huge\""},
      {{{"huge", Dtype::F32, {kHuge, 0, kHuge}, data}}, "\"huge\""},
      {{{"huge", Dtype::U8, {kHuge}, data}}, "\"huge\""},
      {{{"p", Dtype::U8, {kHuge / 2}, data}, {"q", Dtype::U8, {kHuge / 2}, data}}, "\"q\""},
      {{{"what", static_cast<Dtype>(200), {1}, data}}, "dtype"},
  };
  for (const auto& [tensors, part] : cases) {
    StringSink sink;
    CAPTURE(part);
    CHECK_THAT(message_of<InvalidArgument>([&] { write_safetensors(sink, tensors); }),
               ContainsSubstring(part));
    CHECK(sink.writes() == 0);
  }
  CHECK_THROWS_AS(written_safetensors({}, {{"k", "\xFF"}}), InvalidArgument);
  CHECK_THROWS_AS(written_safetensors({}, {{"\xFF", "v"}}), InvalidArgument);
  // Each of them takes six bytes of a header.
  const std::string long_value(kMaxSafetensorsHeader / 6, '\x01');
  CHECK_THAT(message_of<InvalidArgument>([&] {
               written_safetensors({}, {{"k", long_value}});
             }),
             ContainsSubstring("the limit is 100000000"));
  std::map<std::string, std::string> many;
  for (size_t i = 0; i < kMaxSafetensorsMetadata; ++i) many[std::to_string(i)];
  CHECK(parsed_safetensors(written_safetensors({}, many)).metadata().size() == many.size());
  many["one more"];
  CHECK_THROWS_AS(written_safetensors({}, many), InvalidArgument);
}

TEST_CASE("a file of tensors that are made one at a time has the same bytes", "[core][safetensors]") {
  const std::vector<TensorBytes> tensors = {{"b", Dtype::U8, {7}, some_tensor_data().data()},
                                            {"z", Dtype::F64, {2, 3}, some_tensor_data().data() + 5},
                                            {"none", Dtype::F32, {0}, nullptr},
                                            {"a", Dtype::F64, {}, some_tensor_data().data() + 1}};
  std::vector<TensorRecord> records;
  for (const TensorBytes& tensor : tensors) records.push_back({tensor.name, tensor.dtype, tensor.shape});
  std::vector<size_t> made;
  const auto produce = [&](size_t i, ByteSink& out) {
    made.push_back(i);
    const size_t bytes = i == 0 ? 7 : i == 1 ? 48 : 8;
    const char* data = static_cast<const char*>(tensors[i].data);
    out.write(data, 3);
    out.write(data + 3, bytes - 3);
  };
  StringSink sink;
  write_safetensors(sink, records, produce, {{"format", "pt"}});
  CHECK(sink.text() == written_safetensors(tensors, {{"format", "pt"}}));
  CHECK(made == std::vector<size_t>{3, 1, 0});  // in the order of the file, and only what has elements

  StringSink other;
  CHECK_THROWS_WITH(write_safetensors(other, records, [](size_t, ByteSink& out) { out.write("x", 1); }),
                    ContainsSubstring("\"a\"") && ContainsSubstring("1 bytes of the 8"));
}

TEST_CASE("a header alone tells what the file has and where", "[core][safetensors]") {
  const std::string text = written_safetensors({{"b", Dtype::U8, {7}, some_tensor_data().data()},
                                                {"a", Dtype::F32, {2, 1}, some_tensor_data().data()}});
  MemoryFileSystem files;
  files.content("file") = text;
  FileReader reader(files, "file");
  const SafetensorsFile file = SafetensorsFile::read_header(reader, "file");
  CHECK(file.names_in_file_order() == std::vector<std::string_view>{"a", "b"});
  CHECK(file.find("a")->shape == std::vector<int64_t>{2, 1});
  CHECK(file.find("a")->data == nullptr);
  std::string rest(15, ' ');
  reader.read_next(rest.data(), rest.size());
  CHECK(rest == text.substr(text.size() - 15));
  CHECK(reader.finish() == checksum_of(text));

  // Cut short or grown anywhere, it is refused as the whole file is.
  for (size_t size = 0; size < text.size() + 2; ++size) {
    if (size == text.size()) continue;
    CAPTURE(size);
    files.content("file") = (text + "xx").substr(0, size);
    FileReader damaged(files, "file");
    CHECK_THROWS_WITH(SafetensorsFile::read_header(damaged, "file"), ContainsSubstring("file"));
  }
}

}  // namespace pacer::testing
