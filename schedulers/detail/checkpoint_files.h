// Which file of a checkpoint holds what, and who writes and reads it.
#pragma once

#include <map>
#include <string>

#include <pacer/core/checkpoint_manifest.h>
#include <pacer/schedulers/detail/checkpoint_save.h>
#include <pacer/schedulers/detail/training_state.h>

namespace pacer::detail {

constexpr const char* kModelFile = "model.safetensors";

// The file of that name; null where the checkpoint has none.
const CheckpointFile* find_file(const CheckpointManifest& manifest, const std::string& name);

// Who writes which tensor of the optimizer's state, the same on whichever rank it is asked for: the largest
// tensor first, each goes to the rank that has least to write.
std::map<std::string, int> writers_of(const TrainingState& state, int ranks);

// What this rank writes of the state: rank 0 the model, each what it is the writer of, and what only it has.
RankFiles files_of_rank(TrainingState state, const std::map<std::string, int>& writers,
                        const Communicator& world);

// One number for the names, dtypes and shapes of tensors: ranks that share a file between them must agree on
// it.
std::string outline_of(const NamedTensors& tensors);

// The folder of the newest checkpoint that verifies; empty where there is no checkpoint at all. Says on
// stderr what it passed over. FileError where there are checkpoints and none verifies.
std::string find_newest(const std::string& root);

// What this rank goes on from; with another number of ranks than those that saved it, its part of what they
// had.
TrainingState read_state(const SessionParts& parts, const std::string& folder);

}  // namespace pacer::detail
