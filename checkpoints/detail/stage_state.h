// What checkpoints do where the ranks of a Pipeline each have the state of their stages: every tensor is
// written by the first rank that has it.
#pragma once

#include <string>
#include <vector>

#include <pacer/hooks/detail/training_tensors.h>

namespace pacer::detail {

// One line for each tensor that this rank has.
std::string listing_of(const TrainingState& state);

// Adds what only other ranks have, without memory (device meta), and says who writes what. `listings` are
// those of all ranks. `replicas`: how many ranks have the same stage. Throws InvalidArgument where they
// differ.
WriterOfTensor complete_stages(TrainingState& state, const std::vector<std::string>& listings, int replicas);

}  // namespace pacer::detail
