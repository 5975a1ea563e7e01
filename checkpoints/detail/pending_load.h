// A checkpoint that was read, checked and found to fit, and is not in force yet: several Sessions load together or
// not at all.
#pragma once

#include <string>
#include <utility>

#include <pacer/checkpoints/detail/training_state.h>

namespace pacer::detail {

// Destroyed without Checkpoints::commit_load, it puts the Session back as it was. Of several, destroy the last first.
struct PendingLoad {
  PendingLoad(SessionParts& parts, TrainingState state, std::string from)
      : folder(std::move(from)), import(parts, std::move(state)) {}
  std::string folder;
  StateImport import;
};

}  // namespace pacer::detail
