// The manifest of a checkpoint: what is written reads back, and what a forger may write is refused.
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/checkpoint_manifest.h>
#include <pacer/files/checksum.h>

#include "support/catch.h"
#include "support/files/string_sink.h"
#include "support/message_of.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

CheckpointManifest sample_manifest() {
  return {7, 2, "0.1.0", {{"libtorch", "2.11.0"}, {"nccl", "2.27"}}, {{"a.bin", 3, checksum_of("abc")}}};
}

// A manifest with its text changed and its own checksum made to fit: a forger can do as much.
std::string forged_manifest(const std::string& from, const std::string& to) {
  std::string text = manifest_text(sample_manifest());
  const size_t at = text.find(from);
  if (at == std::string::npos) throw std::logic_error("nothing to forge: " + from);
  text.replace(at, from.size(), to);
  text.resize(text.size() - std::strlen("\"\n}\n") - 32);
  return text + checksum_of(text) + "\"\n}\n";
}

std::string manifest_refusal(const std::string& text) {
  return message_of<FileError>([&] { parse_manifest(as_bytes(text), "x/manifest.json"); });
}

}  // namespace

TEST_CASE("a manifest reads back as it was written", "[core][checkpoint]") {
  const CheckpointManifest before = sample_manifest();
  const CheckpointManifest after = parse_manifest(as_bytes(manifest_text(before)), "x");
  CHECK(manifest_text(after) == manifest_text(before));
  CHECK(after.step == 7);
  CHECK(after.libraries == before.libraries);
  CHECK(after.files[0].name == "a.bin");
  CHECK(manifest_text(parse_manifest(as_bytes(manifest_text({0, 1, "", {}, {}})), "x")) ==
        manifest_text({0, 1, "", {}, {}}));
}

TEST_CASE("a manifest is written as it always was, to the byte", "[core][checkpoint]") {
  CheckpointManifest manifest = sample_manifest();
  manifest.is_finite = false;
  const std::string text = manifest_text(manifest);
  CHECK(text.substr(0, text.size() - 32 - std::strlen("\"\n}\n")) == R"({
  "format": "pacer checkpoint",
  "format_version": 1,
  "pacer_version": "0.1.0",
  "libraries": {"libtorch": "2.11.0", "nccl": "2.27"},
  "step": 7,
  "world_size": 2,
  "finite_parameters": false,
  "files": [
    {"name": "a.bin", "size": 3, "xxh3_128": "06b05ab6733a618578af5f94892f3950"}
  ],
  "manifest_xxh3_128": ")");
  CHECK_THAT(manifest_text({0, 1, "", {}, {}}), ContainsSubstring(R"(
  "libraries": {},
  "step": 0,
  "world_size": 1,
  "files": [],
  "manifest_xxh3_128": ")"));
}

TEST_CASE("a manifest whose checksum fits is still not believed", "[core][checkpoint]") {
  REQUIRE(manifest_refusal(forged_manifest("\"step\"", "\"step\"")).empty());
  const std::pair<const char*, const char*> forgeries[] = {
      {"pacer checkpoint", "other"},
      {"\"format_version\": 1", "\"format_version\": 2"},
      {"\"step\": 7", "\"step\": -7"},
      {"\"step\": 7", "\"step\": 18446744073709551616"},
      {"\"step\": 7", "\"step\": {}"},
      {"\"step\": 7,", ""},
      {"\"step\": 7", "\"step\": 7, \"step\": 7"},
      {"\"world_size\": 2", "\"world_size\": 0"},
      {"\"world_size\"", "\"words_size\""},
      {"\"nccl\"", "\"libtorch\""},
      {"a.bin", "../a.bin"},
      {"a.bin", "..\\u002fa.bin"},
      {"a.bin", "a\\u0000.bin"},
      {"a.bin", "manifest.json"},
      {"a.bin", ""},
      {"\"size\": 3", "\"size\": -3"},
      {"\"size\": 3", "\"size\": 3.0"},
      {"\"xxh3_128\": \"", "\"xxh3_128\": \"0"},
      {"]", ", {\"name\": \"a.bin\", \"size\": 0, \"xxh3_128\": \"99aa06d3014798d86001c324468d497f\"}]"},
      {"\"files\": [", "\"files\": [[[[["},
      {"\"files\"", "\"more\": 1, \"files\""},
      {"{", "["},
  };
  for (const auto& [from, to] : forgeries) {
    CAPTURE(from, to);
    CHECK_THAT(manifest_refusal(forged_manifest(from, to)), ContainsSubstring("x/manifest.json, byte "));
  }
  CHECK_THAT(manifest_refusal(forged_manifest("\"format_version\": 1", "\"format_version\": 2")),
             ContainsSubstring("\"format_version\" is 2"));
  CHECK_FALSE(manifest_refusal(std::string(kMaxManifestBytes + 1, ' ')).empty());
}

TEST_CASE("a manifest of too many libraries is refused in both directions", "[core][checkpoint]") {
  CheckpointManifest manifest = sample_manifest();
  std::string more;
  for (size_t i = manifest.libraries.size(); i < kMaxManifestLibraries; ++i) {
    manifest.libraries.emplace(std::to_string(i), "");
    more += '"' + std::to_string(i) + "\":\"\",";
  }
  CHECK(manifest_refusal(manifest_text(manifest)).empty());
  manifest.libraries.emplace("one more", "");
  CHECK_THROWS_WITH(manifest_text(manifest), ContainsSubstring("1000 libraries, not 1001"));
  const std::string before = "\"libraries\": {";
  CHECK_THAT(manifest_refusal(forged_manifest(before, before + more + "\"x\":\"\",")),
             ContainsSubstring("more than 1000 libraries"));
}

}  // namespace pacer::testing
