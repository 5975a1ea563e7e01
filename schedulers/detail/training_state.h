// Everything a run needs to go on, as named tensors, and its way back: checked completely, then
// put in force; on any error nothing has changed.
#pragma once

#include <pacer/optimizers/named_tensors.h>
#include <pacer/schedulers/session_parts.h>

namespace pacer::detail {

struct TrainingState {
  NamedTensors model;      // parameters and buffers by name; they share the model's memory when exported
  NamedTensors optimizer;  // see SessionOptimizer::export_state
  // SessionOptimizer::export_rank_state: others on each rank, where all the rest is the same but for
  // `session`.
  NamedTensors rank_optimizer;
  NamedTensors session;  // "progress/...", "random/...", "guard/...", "hook/NAME/..."
};

TrainingState export_state(const SessionParts& parts);

// What a rank takes over of the session state of a run with another number of ranks: all but the order of
// gradient buckets, and the random state only where `had_this_rank`; a new rank keeps the one it has.
NamedTensors session_of_other_ranks(const SessionParts& parts, NamedTensors saved, bool had_this_rank);

// Throws InvalidArgument that names the tensor where anything is missing, left over or does not fit.
void import_state(SessionParts& parts, const TrainingState& state);

}  // namespace pacer::detail
