// Everything a run needs to go on, as named tensors, and its way back: checked completely, then
// put in force; on any error nothing has changed.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pacer/hooks/detail/training_tensors.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

TrainingState export_state(SessionParts& parts);

// Does what a load that failed could not do, because memory was short: hooks, random state and progress go back
// to what they were. It throws where memory still is, and can be called again. Does nothing where nothing is
// owed.
void put_session_back(SessionParts& parts);

// What a rank takes over of the session state of a run with other ranks, or whose gradients came together in
// another way: not the order of gradient buckets then. The random state only where `had_this_rank`; a new
// rank keeps the one it has.
NamedTensors session_of_other_run(const SessionParts& parts, NamedTensors saved, bool same_ranks,
                                  bool had_this_rank);

// An import in two halves, for ranks that load together or not at all.
class StateImport {
 public:
  // Checks everything, makes the optimizer's new state, and lets the hooks load theirs. Throws
  // InvalidArgument that names the tensor where anything is missing, left over or does not fit; then nothing
  // has changed. Tensors of the optimizer's state may become the optimizer's own.
  StateImport(SessionParts& parts, TrainingState state);
  // Without commit() hooks, random state and progress go back to what they were; where memory is too short for
  // that, it is owed to put_session_back().
  ~StateImport();
  StateImport(const StateImport&) = delete;
  StateImport& operator=(const StateImport&) = delete;

  // Puts optimizer and model in force, too.
  void commit();
  // A sentence where the run has another kind of device than the one that was saved, and what becomes of the
  // random generators then; empty otherwise.
  const std::string& random_state_note() const { return random_state_note_; }
  // The same where a step takes another number of micro-batches than it did.
  const std::string& micro_batches_note() const { return micro_batches_note_; }

 private:
  SessionParts& parts_;
  std::vector<std::pair<at::Tensor, at::Tensor>> values_;  // the model's tensors, and what to load into each
  std::shared_ptr<const NamedTensors> before_;             // the Session's own part
  std::vector<std::function<void()>> put_in_force_;  // of the optimizer and of hooks' state by parameter
  std::string random_state_note_, micro_batches_note_;
  bool committed_ = false;

  void go_back() noexcept;
};

// Both halves, of copies.
void import_state(SessionParts& parts, const TrainingState& state);

}  // namespace pacer::detail
