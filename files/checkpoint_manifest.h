// manifest.json, the file that makes a folder a checkpoint: what was saved, by which versions, and the size
// and checksum of every file. Text and back; the folder itself is files/checkpoint_folder.h.
//
//   {
//     "format": "pacer checkpoint",
//     "format_version": 1,
//     "pacer_version": "0.1.0",
//     "libraries": {"libtorch": "2.11.0"},
//     "step": 1000,
//     "world_size": 1,
//     "files": [
//       {"name": "model.safetensors", "size": 10240, "xxh3_128": "99aa06d3014798d86001c324468d497f"}
//     ],
//     "manifest_xxh3_128": "5e6a1ce0c3b4a7f0d3a2b4c5d6e7f809"
//   }
//
// The last field is the XXH3-128 of all text before its digits, so that a flip anywhere is found.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace pacer {

// One file of a checkpoint, as its manifest lists it.
struct CheckpointFile {
  std::string name;
  int64_t size = 0;      // bytes
  std::string checksum;  // as files/checksum.h writes it
};

struct CheckpointManifest {
  int64_t step = 0;
  int64_t world_size = 1;
  std::string pacer_version;
  std::map<std::string, std::string> libraries;  // name, version
  std::vector<CheckpointFile> files;
  bool is_finite = true;  // its parameters; "finite_parameters": false stands behind world_size if not
};

constexpr const char* kManifestName = "manifest.json";
// Room for some 8,000 files; more are refused in both directions, so that no manifest fills the memory.
constexpr int64_t kMaxManifestBytes = 1 << 20;
constexpr size_t kMaxManifestLibraries = 1000;

// Whether a file of a checkpoint may have this name: 1 to 200 of A-Z a-z 0-9 . _ - with no dot in front, and
// not the manifest's. There is no way to write a path with these.
bool is_checkpoint_file_name(std::string_view name);

// InvalidArgument for fields that cannot be: a negative step, a world size below 1, text that is not UTF-8,
// names that no file may have or that are repeated, and beyond the limits.
std::string manifest_text(const CheckpointManifest& manifest);

// Safe for any bytes; `path` is for messages. FileError with the path, the byte and what is wrong.
CheckpointManifest parse_manifest(std::vector<char> text, const std::string& path);

}  // namespace pacer
