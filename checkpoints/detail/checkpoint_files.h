// Which file of a checkpoint holds what, and who writes and reads it.
#pragma once

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <pacer/checkpoints/detail/checkpoint_save.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/files/checkpoint_manifest.h>
#include <pacer/hooks/detail/training_tensors.h>

namespace pacer::detail {

constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kModelIndex = "model.safetensors.index.json";

// The name of what one rank of so many has of its own: "optimizer", "errors" or "session".
std::string file_of_rank(const char* kind, int rank, int world_size);

// The file of that name; null where the checkpoint has none.
const CheckpointFile* find_file(const CheckpointManifest& manifest, const std::string& name);

// How many ranks saved the checkpoint. FileError where the manifest names more than it has files of: each has
// written one at least.
int ranks_of(const CheckpointManifest& manifest, const std::string& folder);

// The same on whichever rank it is asked for: the largest tensor first, each goes to the rank that has least
// to write. The model is rank 0's, unless it is to be dealt out, too.
WriterOfTensor writers_of(const TrainingState& state, int ranks, bool deals_model_out);

// What this rank writes of the state: what it is the writer of, and what only it has.
TensorsByFile tensors_of_rank(TrainingState state, const WriterOfTensor& writers, const Communicator& world);

// Files of text beside them: where the model is dealt out, rank 0's index of its files, as Python's readers
// of safetensors know it.
std::vector<std::pair<std::string, std::string>> texts_of_rank(const NamedTensors& model,
                                                               const WriterOfTensor& writers,
                                                               const Communicator& world);

// The files of the model in a checkpoint: one, or one for each rank. Throws FileError where there are none.
std::vector<CheckpointFile> model_files(const std::string& folder, const CheckpointManifest& manifest);

// One number for the names, dtypes and shapes of tensors: ranks that share a file between them must agree on
// it.
std::string fingerprint_of(const NamedTensors& tensors);

// The folder of the newest checkpoint that verifies; empty where there is no checkpoint at all. Says on
// stderr what it passed over. FileError where there are checkpoints and none verifies.
std::string find_newest(const std::string& root);

// The folder of the checkpoint of that step. InvalidArgument where there is none, FileError where it does not
// verify.
std::string find_step(const std::string& root, int64_t step);

// The checkpoints that verify, newest first, with their manifests; of those whose parameters are finite, if any
// are. Reads no more of them once it has `at_most`. Says on stderr what it passed over.
std::vector<std::pair<CheckpointInfo, CheckpointManifest>> verified_checkpoints(
    const std::string& root, size_t at_most = std::numeric_limits<size_t>::max());

// The steps of Checkpoints::saved_steps as numbers with spaces between them. Says on stderr what it passed
// over.
std::string list_steps(const std::string& root);

// What this rank goes on from; with another number of ranks than those that saved it, its part of what they
// had.
TrainingState read_state(const SessionParts& parts, const std::string& folder);

}  // namespace pacer::detail
