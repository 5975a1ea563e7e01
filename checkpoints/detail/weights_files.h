// Where the weights that load_weights reads lie: one safetensors file, those of a checkpoint, or those of a
// folder as Hugging Face has it.
#pragma once

#include <string>
#include <vector>

#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/detail/weights_index.h>
#include <pacer/files/checkpoint_manifest.h>
#include <pacer/files/safetensors.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

struct WeightsFiles {
  std::string where;  // for messages: the only file, or the folder
  std::vector<std::string> paths;
  std::string checkpoint;               // the folder of one; empty where it is none
  std::vector<CheckpointFile> entries;  // of a checkpoint, in the order of `paths`
  WeightsIndex index;                   // of the folder; empty where there is none
};

// `path`: a file, the folder of a checkpoint, a folder of checkpoints, of which it takes the newest that
// verifies, or a folder with model.safetensors or model.safetensors.index.json. Links to the files of the
// latter are followed: the cache of Hugging Face is made of them. FileError.
WeightsFiles find_weights(const std::string& path);

// Those of a folder with model.safetensors or model.safetensors.index.json, whatever checkpoints are there. FileError.
WeightsFiles find_hugging_face_weights(const std::string& folder);

// Names and facts of the tensors in the files, no values. Where there is an index, each tensor must be in the
// file that it names and in no other. (The index's total_size is not compared: its writers count tied tensors
// in different ways, and each file's own header says how long the file must be.) FileError.
std::vector<SafetensorsFile> read_headers(const WeightsFiles& files);

// The tensors that `place_of` wants. Files of a checkpoint are compared with their checksums.
NamedTensors read_values(const WeightsFiles& files, const TensorPlace& place_of);

// The text of a small file such as config.json, through links. FileError, also for one of more than a megabyte.
std::string read_config_file(const std::string& path);

// The path with all links in it followed, as other programs read it; as it is where there is nothing.
std::string without_links(const std::string& path);

}  // namespace pacer::detail
