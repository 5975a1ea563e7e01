// Which file of a checkpoint holds what, and who writes and reads it.
#pragma once

#include <string>

#include <pacer/core/checkpoint_manifest.h>
#include <pacer/schedulers/detail/checkpoint_save.h>
#include <pacer/schedulers/detail/training_state.h>

namespace pacer::detail {

constexpr const char* kModelFile = "model.safetensors";

// The file of that name; null where the checkpoint has none.
const CheckpointFile* find_file(const CheckpointManifest& manifest, const std::string& name);

// What this rank writes of the state: rank 0 the model, each its share of the optimizer's state, which is the
// same on all of them, and what only it has.
RankFiles files_of_rank(TrainingState state, const Communicator& world);

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
