// Checkpoints of everything a run needs to go on as if it had never stopped: model, optimizer, hooks, random
// state, position in the data.
//
//   session.use(pacer::Checkpoints(pacer::CheckpointsOptions("run/checkpoints").every(1'000)));
//   session.resume();
//
// A checkpoint is a folder step-0000001000 with manifest.json (sizes and checksums of all files, written
// last), model.safetensors, optimizer-rank-00000-of-00001.safetensors and
// session-rank-00000-of-00001.safetensors; Python's `safetensors` reads them as they are. A save that fails
// or is killed leaves the former checkpoint as it was. Files are written beside training, by a thread.
// Everything goes by parameter name; loading checks all of it before it changes anything.
//
// Several ranks save and load together, in one folder on a file system that all of them share: rank 0 writes
// the model, or where ranks keep parts of it each a share, each rank a share of the optimizer's state, its
// session file and, for a 1-bit optimizer, its errors. What goes wrong on one rank is an error on every rank,
// and a load that fails on one rank changes nothing on any.
//
// With as many ranks as saved it, a run goes on to the bit. With another number it goes on from the same
// model, optimizer, schedules and position in the data; a rank that did not exist before keeps the random
// state it started with, gradient buckets are learned anew, and errors are joined
// (SessionOptimizer::join_rank_states). Keep the global batch: it is the loader's.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <pacer/hooks/hook.h>
#include <pacer/hooks/once_on_first_rank.h>

namespace pacer {

class FolderLock;

namespace detail {
class CheckpointSave;
class HostSnapshot;
class JointResume;
class JointSaves;
struct JointStep;
struct PendingLoad;
class StopSignals;
}  // namespace detail

struct CheckpointsOptions {
  // The folder for the checkpoints of one run.
  CheckpointsOptions(std::string folder) : folder_(std::move(folder)) {}
  CheckpointsOptions(const char* folder) : folder_(folder) {}  // so that Checkpoints("run") is one
  TORCH_ARG(std::string, folder);
  // Steps between checkpoints, >= 1. The last step of a run is saved, too.
  TORCH_ARG(int64_t, every) = 1000;
  // How long ranks wait for the slowest to save or load.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(30);
  // How many checkpoints stay, >= 1, of Sessions that resume together >= 2; older ones are removed once a
  // newer one is complete, but never the newest whose trained parameters are all finite. One that cannot be removed is named on stderr once and
  // tried again after each save.
  TORCH_ARG(int64_t, keep) = 3;
  // True: training stands still until a checkpoint is complete. False: each rank copies what it writes to
  // host memory, which is kept for the next save, and trains on while a thread writes. What goes wrong there
  // is thrown, on every rank alike, by the next save or by finish.
  TORCH_ARG(bool, synchronous) = false;
  // False: weights that are not trained, those in 4 bits among them, are left out, so that a checkpoint of
  // adapters is as small as they are. Who resumes makes the model with the same frozen weights first; their
  // checksum is compared, also with what they are later: weights that change while they require no gradient
  // (an averaged teacher) and weights that were trained and then frozen are refused. Not with Shards that
  // keep parts of parameters.
  TORCH_ARG(bool, save_frozen) = true;
  // True: SIGTERM or SIGINT, to any rank, ends the run in good order. The step under way is finished, all
  // ranks save a checkpoint after it, and Session::should_stop() says so on all of them. A second signal ends
  // the process at once. The handlers are in place from the first begin on until the hook is destroyed; a
  // signal that was ignored when they came stays ignored.
  TORCH_ARG(bool, stop_on_signal) = false;
};

class Checkpoints : public Hook {
 public:
  // Throws InvalidArgument for an empty folder name and numbers below 1.
  explicit Checkpoints(CheckpointsOptions options);
  // Waits for this rank's part of a checkpoint that is still being written. Where finish() was not called,
  // the other ranks have 2 s more for theirs, else the checkpoint is lost.
  ~Checkpoints() override;
  Checkpoints(Checkpoints&&) noexcept;

  std::string hook_name() const override { return "checkpoints"; }
  Slot slot() const override { return Slot::checkpoint; }
  bool exclusive() const override { return true; }
  // Throws InvalidArgument for an optimizer whose state cannot be saved by name (torch's Adam, AdamW, SGD,
  // RMSprop and Adagrad can, and all of pacer's).
  void attach(SessionParts& parts) override;
  std::string agreement() const override;
  // Throws InvalidArgument for a model with tensors that no file can hold, or that nothing can be loaded
  // into, and for save_frozen(false) with Shards of parameters.
  void arrange() override;
  // Throws InvalidArgument where the folder has checkpoints that this run was not resumed from, or another
  // run writes to it. From here to finish() it is this run's: a lock says so, which ends with the process.
  void start(const Progress& progress) override;
  void after_step(StepReport& report) override;
  void finish(const Progress& progress) override;
  bool needs_finish() const override { return true; }
  // With save_frozen(false) it saves the checksum of the frozen weights, and load throws InvalidArgument
  // where this model has others.
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

  // Saves now and waits until the checkpoint is complete; throws FileError with path and reason where that
  // fails, InvalidArgument where the folder has checkpoints that this run was not resumed from. Returns the
  // folder. All ranks call it, between the same steps. After resume_together it saves all of the Sessions,
  // and nothing where none has taken a step since they were saved.
  std::string save_now();
  // For Session::resume: loads the newest checkpoint that verifies, returns its step; none where there is no
  // checkpoint. Throws InvalidArgument that names what does not fit, FileError where there are checkpoints
  // and none verifies; nothing was changed then.
  std::optional<int64_t> load_newest();
  // The same for the checkpoint of one step. Throws InvalidArgument where there is none, FileError where it
  // does not verify. Newer ones stay until this run saves their steps, and replaces them.
  void load_step(int64_t step);
  // The steps of the checkpoints that verify, newest first; of those whose parameters are finite, if any are.
  // Reads all of them. All ranks call it together.
  std::vector<int64_t> saved_steps() const;

 private:
  friend class detail::JointSaves;
  friend class detail::JointResume;

  void check_folder();
  void unlock();
  std::optional<int64_t> load_from(const std::function<std::string()>& find);
  // Reads and checks, without changing what cannot be put back; null where there is nothing to load.
  std::unique_ptr<detail::PendingLoad> prepare_load(const std::function<std::string()>& find);
  void commit_load(detail::PendingLoad& load);
  std::vector<detail::JointStep> joint_steps() const;
  void remember_versions();
  void check_frozen();
  // `text`: what a checkpoint that is saved with others has in common with them; empty: it is saved alone.
  void begin_save(const std::string& text = {});
  std::string complete_save();
  void say_what_stays(const detail::CheckpointSave& save);
  std::vector<std::string> on_all_ranks_or_none(const char* action,
                                                const std::function<std::string()>& f) const;

  CheckpointsOptions options_;
  SessionParts* parts_ = nullptr;
  int64_t saved_step_ = -1;   // of the newest checkpoint, this run's or the one it resumed from
  std::string saved_folder_;  // of the newest that this run completed or resumed from; on all ranks rank 0's
  bool folder_is_checked_ = false;
  bool folder_is_locked_ = false;     // on all ranks alike
  std::unique_ptr<FolderLock> lock_;  // of rank 0
  OnceOnFirstRank warns_of_not_finite_, warns_of_sampler_;
  int64_t steps_taken_ = 0;  // in this process
  bool stop_was_seen_ = false;
  std::unique_ptr<detail::HostSnapshot> snapshot_;
  std::unique_ptr<detail::CheckpointSave> saving_;  // under way; it reads the snapshot
  std::shared_ptr<detail::JointSaves> joint_;       // after resume_together
  // What the checkpoint under way and the newest have in common with those of other Sessions.
  std::string saving_text_, saved_text_;
  bool saved_is_finite_ = true;   // on rank 0, which alone removes old checkpoints
  std::optional<int64_t> stays_;  // the step of this Session in the newest joint save that is finite in all
  std::unique_ptr<detail::StopSignals> stop_signals_;
  bool was_loaded_ = false;
  mutable at::Tensor frozen_checksum_;  // once it was asked for
  // The versions of tensors by name: of frozen ones when they were compared last, and of all of the model
  // before it was trained and before a checkpoint was loaded.
  std::map<std::string, int64_t> frozen_versions_, first_versions_;
  std::set<int64_t> not_removed_;  // steps of old checkpoints that could not be removed, as was said already
};

}  // namespace pacer
