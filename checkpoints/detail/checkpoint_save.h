// One checkpoint on its way to the disk. Each rank writes its own files and leaves a record of them in the
// folder of the save under way; rank 0 waits for all records, writes the manifest and puts the checkpoint in
// its place. No rank sends another a message meanwhile, so that all of it can happen in a thread beside
// training. Nothing here knows where the tensors come from.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pacer/files/checkpoint_folder.h>
#include <pacer/files/save_records.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// What a rank writes: names of files and the tensors in them.
using TensorsByFile = std::vector<std::pair<std::string, NamedTensors>>;

struct SaveJob {
  int64_t step = 0;
  std::string staging;                       // the folder of the save under way
  std::unique_ptr<CheckpointWriter> writer;  // of rank 0; null elsewhere
  int rank = 0;
  CheckpointFacts facts;                 // with the number of ranks
  std::chrono::milliseconds timeout{0};  // how long rank 0 waits for the others
  std::string root;
  int64_t keep = 1;                                        // checkpoints that stay
  std::optional<int64_t> stays;                            // the step of one more, if any
  std::vector<std::pair<std::string, std::string>> texts;  // names of files and what this rank writes to them
  std::function<bool(const std::string&)> must_be_finite;  // of tensors in the model's files; may be empty
};

class CheckpointSave {
 public:
  explicit CheckpointSave(SaveJob job) : job_(std::move(job)), patience_(job_.timeout) {}
  // Waits for a thread that still writes; rank 0's then gives the others kGrace to leave their records.
  ~CheckpointSave();
  CheckpointSave(const CheckpointSave&) = delete;
  CheckpointSave& operator=(const CheckpointSave&) = delete;

  // Call one of them, once. In a thread: the tensors are in host memory, and nobody writes to them until
  // wait() has returned. Here: `check` is called after this rank's files are written and before anybody hears
  // of them; where it throws, they count for nothing.
  void write_in_thread(TensorsByFile files);
  void write_here(const TensorsByFile& files, const std::function<void()>& check);

  // Returns when this rank's files are on the disk; throws what went wrong with them.
  void wait_until_written();
  // Then, once all ranks have written: returns when the checkpoint is complete, its folder on rank 0 and ""
  // elsewhere. Throws what went wrong.
  std::string wait();
  // Somebody failed: nobody waits for records any longer.
  void give_up() { patience_ = std::chrono::seconds(0); }

  int64_t step() const { return job_.step; }
  // Returns, on rank 0 and after wait(), the old checkpoints that could not be removed.
  const std::vector<RemovalFailure>& not_removed() const { return not_removed_; }
  // Returns, on rank 0 and after wait(), whether all of the model that must be finite is.
  bool is_finite() const { return is_finite_; }

 private:
  static constexpr std::chrono::seconds kGrace{2};

  // These do not throw: what goes wrong is kept.
  void write(const TensorsByFile& files, const std::function<void()>& check) noexcept;
  void complete() noexcept;
  SaveRecord record_of(int rank) const;

  SaveJob job_;
  std::vector<CheckpointFile> written_;
  bool is_finite_ = true;           // the parameters that were written; then those of all ranks
  std::exception_ptr write_error_;  // read after is_written_
  std::promise<void> is_written_;
  std::thread thread_;
  bool in_thread_ = false;
  std::exception_ptr error_;  // what went wrong in complete(), which sets the next two
  std::string folder_;
  std::vector<RemovalFailure> not_removed_;
  std::atomic<std::chrono::milliseconds> patience_;  // how long rank 0 waits for each record from now on
};

}  // namespace pacer::detail
