// Small checkpoints whose content is known by a seed, and how to tell one from the other to the byte.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <pacer/files/checkpoint_folder.h>

#include "support/samples.h"

namespace pacer::testing {

using FileContents = std::map<std::string, std::string>;  // by name

inline std::string random_text(uint64_t seed, size_t bytes) {
  Samples samples(seed);
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(samples.below(256));
  return text;
}

inline FileContents sample_contents(uint64_t seed) {
  return {{"model.safetensors", random_text(seed, 3000)},
          {"optimizer-rank-00000-of-00001.safetensors", random_text(seed + 1000, 500)},
          {"empty", ""}};
}

// In pieces, so that there are several writes to fail.
inline std::string save_checkpoint(FileSystem& files, const std::string& root, int64_t step,
                                   const FileContents& contents) {
  CheckpointWriter writer(files, root, step);
  for (const auto& [name, text] : contents) {
    writer.write(name, [&, &text = text](ByteSink& out) {
      for (size_t at = 0; at < text.size(); at += 1024)
        out.write(text.data() + at, std::min<size_t>(1024, text.size() - at));
    });
  }
  return writer.commit({4, "0.1.0", {{"libtorch", "2.11.0"}}});
}

inline FileContents loaded_contents(FileSystem& files, const std::string& folder) {
  FileContents contents;
  for (const auto& [name, bytes] : open_checkpoint(folder, files).files) {
    contents[name] = std::string(bytes.begin(), bytes.end());
  }
  return contents;
}

inline std::vector<std::string> names_in(FileSystem& files, const std::string& folder) {
  return list_folder(files, folder);
}

}  // namespace pacer::testing
