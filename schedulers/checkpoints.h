// Checkpoints of everything a run needs to go on as if it had never stopped: model, optimizer, hooks, random
// state, position in the data.
//
//   session.use(pacer::Checkpoints(pacer::CheckpointsOptions("run/checkpoints").every(1'000)));
//   session.resume();
//
// A checkpoint is a folder step-0000001000 with manifest.json (sizes and checksums of all files, written
// last), model.safetensors, optimizer-rank-00000-of-00001.safetensors and
// session-rank-00000-of-00001.safetensors; Python's `safetensors` reads them as they are. A save that fails
// or is killed leaves the former checkpoint as it was. Everything goes by parameter name; loading checks all
// of it before it changes anything.
//
// Several ranks save and load together, in one folder on a file system that all of them share: rank 0 writes
// model and optimizer, which are the same everywhere, each rank its session file and, for a 1-bit optimizer,
// its errors. What goes wrong on one rank is an error on every rank.
//
// With as many ranks as saved it, a run goes on to the bit. With another number it goes on from the same
// model, optimizer, schedules and position in the data; a rank that did not exist before keeps the random
// state it started with, gradient buckets are learned anew, and errors are joined
// (SessionOptimizer::join_rank_states). Keep the global batch: it is the loader's.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <torch/arg.h>

#include <pacer/schedulers/hook.h>

namespace pacer {

namespace detail {
struct TrainingState;
}

struct CheckpointsOptions {
  // The folder for the checkpoints of one run.
  CheckpointsOptions(std::string folder) : folder_(std::move(folder)) {}
  TORCH_ARG(std::string, folder);
  // Steps between checkpoints, >= 1. The last step of a run is saved, too.
  TORCH_ARG(int64_t, every) = 1000;
  // How long ranks wait for the slowest to save or load.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(30);
  // How many checkpoints stay, >= 1; older ones are removed once a newer one is complete.
  TORCH_ARG(int64_t, keep) = 3;
};

class Checkpoints : public Hook {
 public:
  // Throws InvalidArgument for an empty folder name and numbers below 1.
  explicit Checkpoints(CheckpointsOptions options);

  std::string hook_name() const override { return "checkpoints"; }
  Slot slot() const override { return Slot::checkpoint; }
  bool exclusive() const override { return true; }
  // Throws InvalidArgument for an optimizer whose state cannot be saved by name (torch's Adam, AdamW, SGD,
  // RMSprop and Adagrad can, and all of pacer's).
  void attach(SessionParts& parts) override;
  void after_step(StepReport& report) override;
  void finish(const Progress& progress) override;

  // Saves now; throws FileError with path and reason where that fails. Returns the folder.
  std::string save_now();
  // For Session::resume: loads the newest checkpoint that verifies, returns its step; none where there is no
  // checkpoint. Throws InvalidArgument that names what does not fit, FileError where there are checkpoints
  // and none verifies; nothing was changed then.
  std::optional<int64_t> load_newest();

 private:
  std::vector<std::string> together(const char* action, const std::function<std::string()>& f) const;
  std::string find_newest() const;
  detail::TrainingState read_state(const std::string& folder) const;

  CheckpointsOptions options_;
  SessionParts* parts_ = nullptr;
  int64_t saved_step_ = -1;  // of the newest checkpoint, this run's or the one it resumed from
};

}  // namespace pacer
