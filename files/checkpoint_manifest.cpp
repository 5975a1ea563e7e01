#include <pacer/files/checkpoint_manifest.h>

#include <algorithm>
#include <cstring>

#include <pacer/core/error.h>
#include <pacer/files/checksum.h>
#include <pacer/files/json_scanner.h>
#include <pacer/files/json_writer.h>
#include <pacer/files/utf8.h>

namespace pacer {
namespace {

constexpr std::string_view kManifestFormat = "pacer checkpoint";
constexpr int64_t kManifestVersion = 1;
constexpr std::string_view kBeforeDigits = "\"manifest_xxh3_128\": \"";
constexpr size_t kManifestDigits = 32;
constexpr std::string_view kAfterDigits = "\"\n}\n";

void require_manifest_text(std::string_view what, const std::string& text) {
  require(is_utf8(text), "the ", what, " ", quote_for_message(text), " of a checkpoint is not UTF-8");
}

// A name of the list that occurs twice, or nullptr.
const std::string* repeated_name(const std::vector<CheckpointFile>& files) {
  std::vector<const std::string*> names;
  for (const CheckpointFile& file : files) names.push_back(&file.name);
  std::sort(names.begin(), names.end(), [](const auto* a, const auto* b) { return *a < *b; });
  const auto twice =
      std::adjacent_find(names.begin(), names.end(), [](const auto* a, const auto* b) { return *a == *b; });
  return twice == names.end() ? nullptr : *twice;
}

// The text's own checksum, before anything else of it is believed.
void check_manifest_digits(std::string_view text, const std::string& path) {
  constexpr size_t kTail = kBeforeDigits.size() + kManifestDigits + kAfterDigits.size();
  const bool has_tail = text.size() >= kTail &&
                        text.substr(text.size() - kTail, kBeforeDigits.size()) == kBeforeDigits &&
                        text.substr(text.size() - kAfterDigits.size()) == kAfterDigits;
  require<FileError>(has_tail, path, ", byte ", text.size(),
                     ": the manifest does not end with its own checksum: it is cut short or damaged");
  const size_t at = text.size() - kAfterDigits.size() - kManifestDigits;
  require<FileError>(text.substr(at, kManifestDigits) == checksum_of(text.substr(0, at)), path, ", byte ", at,
                     ": the manifest's checksum does not match its text: it is damaged");
}

CheckpointFile read_file_entry(JsonScanner& scanner) {
  CheckpointFile file;
  scanner.expect('{');
  scanner.expect_key("name");
  const size_t at = scanner.position();
  const std::string_view name = scanner.string();
  if (!is_checkpoint_file_name(name)) {
    scanner.fail_at(at, "the field \"name\" is ", quote_for_message(name),
                    ", which no file of a checkpoint may have");
  }
  file.name = name;
  scanner.expect(',');
  scanner.expect_key("size");
  file.size = scanner.integer();
  scanner.expect(',');
  scanner.expect_key("xxh3_128");
  file.checksum = scanner.string();
  if (!is_checksum(file.checksum)) {
    scanner.fail_at(at, "the field \"xxh3_128\" of ", file.name, " is no checksum of 32 digits");
  }
  scanner.expect('}');
  return file;
}

}  // namespace

bool is_checkpoint_file_name(std::string_view name) {
  constexpr std::string_view kAllowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
  return !name.empty() && name.size() <= 200 && name[0] != '.' && name != kManifestName &&
         name.find_first_not_of(kAllowed) == std::string_view::npos;
}

std::string manifest_text(const CheckpointManifest& manifest) {
  require(manifest.step >= 0, "the step of a checkpoint is ", manifest.step, "; steps start at 0");
  require(manifest.world_size >= 1, "the world size of a checkpoint is ", manifest.world_size,
          "; it is 1 or more");
  require_manifest_text("pacer version", manifest.pacer_version);
  require(manifest.libraries.size() <= kMaxManifestLibraries, "the manifest of a checkpoint takes ",
          kMaxManifestLibraries, " libraries, not ", manifest.libraries.size());
  JsonWriter json;
  json.object(JsonLayout::lines).add("format", kManifestFormat).add("format_version", kManifestVersion);
  json.add("pacer_version", manifest.pacer_version).key("libraries").object(JsonLayout::spaced);
  for (const auto& [name, version] : manifest.libraries) {
    require_manifest_text("library name", name);
    require_manifest_text("library version", version);
    json.add(name, version);
  }
  json.end().add("step", manifest.step).add("world_size", manifest.world_size);
  if (!manifest.is_finite) json.add("finite_parameters", false);
  json.key("files").list(JsonLayout::lines);
  for (const CheckpointFile& file : manifest.files) {
    require(is_checkpoint_file_name(file.name) && file.size >= 0 && is_checksum(file.checksum), "the entry ",
            quote_for_message(file.name), " of a manifest has a name, size or checksum that cannot be");
    json.object(JsonLayout::spaced).add("name", file.name).add("size", file.size);
    json.add("xxh3_128", file.checksum).end();
  }
  const std::string* const twice = repeated_name(manifest.files);
  require(twice == nullptr, "two files of a checkpoint have the name ", twice == nullptr ? "" : *twice);

  std::string text = detail::concatenate(json.end().text(), ",\n  ", kBeforeDigits);
  text += checksum_of(text);
  text += kAfterDigits;
  require(text.size() <= static_cast<size_t>(kMaxManifestBytes), "the manifest of a checkpoint with ",
          manifest.files.size(), " files takes ", text.size(), " bytes; the limit is ", kMaxManifestBytes);
  return text;
}

CheckpointManifest parse_manifest(std::vector<char> text, const std::string& path) {
  require<FileError>(text.size() <= static_cast<size_t>(kMaxManifestBytes), path, " has ", text.size(),
                     " bytes; a manifest has at most ", kMaxManifestBytes);
  check_manifest_digits({text.data(), text.size()}, path);
  JsonScanner scanner(text.data(), text.size(), 0, path);
  CheckpointManifest manifest;
  scanner.expect('{');
  scanner.expect_key("format");
  if (scanner.string() != kManifestFormat)
    scanner.fail_at(0, "the field \"format\" is not that of a checkpoint");
  scanner.expect(',');
  scanner.expect_key("format_version");
  const int64_t version = scanner.integer();
  if (version != kManifestVersion) {
    scanner.fail_at(0, "the field \"format_version\" is ", version, ", this pacer reads ", kManifestVersion,
                    ": use the pacer that wrote it");
  }
  scanner.expect(',');
  scanner.expect_key("pacer_version");
  manifest.pacer_version = scanner.string();
  scanner.expect(',');
  scanner.expect_key("libraries");
  scanner.expect('{');
  if (!scanner.take('}')) {
    do {
      const size_t at = scanner.position();
      if (manifest.libraries.size() == kMaxManifestLibraries) {
        scanner.fail_at(at, "more than ", kMaxManifestLibraries, " libraries");
      }
      const std::string_view name = scanner.string();
      scanner.expect(':');
      if (!manifest.libraries.emplace(name, scanner.string()).second) {
        scanner.fail_at(at, "the library ", quote_for_message(name), " occurs twice");
      }
    } while (scanner.more('}'));
  }
  scanner.expect(',');
  scanner.expect_key("step");
  manifest.step = scanner.integer();
  scanner.expect(',');
  scanner.expect_key("world_size");
  manifest.world_size = scanner.integer();
  if (manifest.world_size < 1) scanner.fail_at(scanner.position(), "the field \"world_size\" is 0");
  scanner.expect(',');
  const size_t key_at = scanner.position();
  std::string_view key = scanner.string();
  if (key == "finite_parameters") {
    scanner.expect(':');
    manifest.is_finite = scanner.boolean();
    scanner.expect(',');
    key = scanner.string();
  }
  if (key != "files") scanner.fail_at(key_at, "the field \"files\" is not where it belongs");
  scanner.expect(':');
  scanner.expect('[');
  if (!scanner.take(']')) {
    do manifest.files.push_back(read_file_entry(scanner));
    while (scanner.more(']'));
  }
  if (const std::string* twice = repeated_name(manifest.files)) {
    scanner.fail_at(scanner.position(), "the file ", *twice, " is listed twice");
  }
  scanner.expect(',');
  scanner.expect_key("manifest_xxh3_128");
  scanner.string();
  scanner.expect('}');
  scanner.expect_end();
  return manifest;
}

}  // namespace pacer
