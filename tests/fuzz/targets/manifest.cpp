// A checkpoint's manifest.json, as it is and with the checksum at its end put right: without that no change
// of a byte would get past the first check. And the records that ranks leave for the one that writes it.
#include <optional>

#include <pacer/files/checkpoint_manifest.h>
#include <pacer/files/checksum.h>
#include <pacer/files/save_records.h>

#include "fuzz/harness.h"
#include "support/files/memory_file_system.h"

namespace pacer::fuzz {
namespace {

const std::string kPath = "manifest.json";
const std::string kTail = "\"manifest_xxh3_128\": \"";

std::string with_checksum(std::string text) {
  const size_t tail = text.rfind(kTail);
  if (tail != std::string::npos) text.resize(tail);
  text += kTail;
  return text + checksum_of(text) + "\"\n}\n";
}

void check_manifest(const std::string& text) {
  std::vector<char> bytes(text.begin(), text.end());
  std::optional<CheckpointManifest> manifest;
  if (!accepts(text.size(), [&] { manifest = parse_manifest(std::move(bytes), kPath); })) return;
  for (const CheckpointFile& file : manifest->files) {
    demand(is_checkpoint_file_name(file.name), "a manifest names a file that no checkpoint has");
  }
  const std::string written = manifest_text(*manifest);
  const CheckpointManifest again = parse_manifest({written.begin(), written.end()}, kPath);
  demand(manifest_text(again) == written, "a manifest differs after it was written and read again");
}

void check_part(const std::string& text) {
  testing::MemoryFileSystem files;
  make_folders(files, "staging");
  files.content("staging/.part-of-rank-3") = text + checksum_of(text) + '\n';
  std::optional<SaveRecord> record;
  if (!accepts(3 * text.size(), [&] { record = take_record("staging", 3, files); })) return;
  demand(record.has_value(), "a record that is there is not found");
  leave_record("staging", 3, *record, files);
  const SaveRecord again = *take_record("staging", 3, files);
  demand(again.failure == record->failure && again.files.size() == record->files.size(),
         "a record of a rank differs after it was written and read again");
  for (const CheckpointFile& file : record->files) {
    demand(is_checkpoint_file_name(file.name) && file.size >= 0 && is_checksum(file.checksum),
           "a record has a file that no checkpoint has");
  }
}

}  // namespace

std::vector<std::string> seeds() {
  CheckpointManifest manifest;
  manifest.step = 1000;
  manifest.world_size = 2;
  manifest.pacer_version = "0.1.0";
  manifest.libraries = {{"libtorch", "2.11.0"}, {"nccl", "2.28"}};
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    manifest.files.push_back({name, 4096, checksum_of(name)});
  }
  std::string libraries =
      "{\n  \"format\": \"pacer checkpoint\",\n  \"format_version\": 1,\n"
      "  \"pacer_version\": \"\",\n  \"libraries\": {";
  for (int i = 0; i < 60000; ++i) libraries += '"' + std::to_string(i) + "\":\"\",";
  libraries += "\"\":\"\"}, \"step\": 0, \"world_size\": 1, \"files\": [], ";
  return {manifest_text(manifest), libraries,
          "model.safetensors 4096 " + checksum_of("") + "\nerrors-1.safetensors 0 " + checksum_of("a") + "\n",
          "failed\nno space left on the device\n"};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text = pacer::fuzz::text_of(data, size);
  pacer::fuzz::check_manifest(text);
  pacer::fuzz::check_manifest(pacer::fuzz::with_checksum(text));
  pacer::fuzz::check_part(text);
  return 0;
}
