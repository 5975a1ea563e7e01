// Records how training goes: one line per record in metrics.jsonl and metrics.csv, curves for TensorBoard,
// and a bar or plain lines on stdout.
//
//   session.use(pacer::Metrics("run"));
//   session.use(pacer::Metrics(pacer::MetricsOptions("run").every(10).total_steps(100'000)));
//
// A record has, in this order: step (counting the one just taken), tokens, loss (the mean over the steps
// since the record before, or since this run began; every step counts alike, and within a step each
// micro-batch as its gradient does), all numbers that other hooks report, of this very step (learning_rate,
// sequence_length, kept_layers, epoch, ...); with a hook that looks at gradients also gradient_norm
// (unscaled, averaged, before clipping), loss_scale (of the coming step, and only where it is not 1) and
// skipped_steps (so far); then seconds_per_step and tokens_per_second, by the host's clock since the record
// before. Time between steps counts, an evaluation too. Where the options say what a token takes,
// operations_per_second, of all ranks, and utilization, the share of what their devices can do, follow.
// Numbers of the loop's own, from Session::record, come behind those of the hooks: the mean of what came since
// the record before.
// A step after which the Validation hook measured has a record, too; what it measures in finish() is a record
// of its own, with the number of the last step, and so is what Session::record was given behind the last one. With several ranks, rank 0 writes; loss and tokens are those
// of all.
//
// On a GPU loss and norm are read late: a step enqueues their copy to pinned memory and never waits for it; a
// later step, or finish(), writes the record. Records are always written in order. Those still on the GPU
// when a run is killed are lost.
//
// A run adds to the files of the run that it resumes: records beyond the step where it starts, left by a run
// that was killed after its last checkpoint, are removed, and so is a line cut short. So no step is recorded
// twice. A run that starts at step 0 therefore empties metrics.jsonl and metrics.csv. TensorBoard's event
// files are never changed: each run adds one, which begins by telling TensorBoard to forget the steps from
// there on. Give each experiment a folder of its own: two runs at a time are refused.
//
// metrics.csv has a column for each key of the first record. A key that appears later gets a column at the
// end: the file is written anew, with empty cells in the earlier rows. Numbers that are not finite are nan,
// inf and -inf there, and strings with these words in metrics.jsonl.
//
// A record that cannot be written (a full disk) is dropped and ends nothing: training and checkpoints go on.
// The first one is a warning that names file and reason; finish() warns once more, with how many were lost.
// After each failure in a row the hook drops more records, up to 255, before it tries its files again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <torch/arg.h>

#include <pacer/hooks/hook.h>

namespace pacer {

class FolderLock;

struct MetricsOptions {
  // Where the files go; created where it is missing, with the folders above it.
  MetricsOptions(std::string folder) : folder_(std::move(folder)) {}
  MetricsOptions(const char* folder) : folder_(folder) {}  // so that Metrics("run") is one
  TORCH_ARG(std::string, folder);
  // Steps between records, >= 1: steps n, 2 n, 3 n, ... are recorded.
  TORCH_ARG(int64_t, every) = 1;
  // Whether metrics.jsonl is written.
  TORCH_ARG(bool, jsonl) = true;
  // Whether metrics.csv is written.
  TORCH_ARG(bool, csv) = true;
  // Whether TensorBoard's events are written.
  TORCH_ARG(bool, tensorboard) = true;
  // One line per record on stdout; a terminal gets one line that is drawn again and again.
  TORCH_ARG(bool, progress) = true;
  // The step where training ends, >= 1, so that progress can say how much is left.
  TORCH_ARG(std::optional<int64_t>, total_steps);
  // The same in tokens, which count where both are set.
  TORCH_ARG(std::optional<int64_t>, total_tokens);
  // Floating-point operations that a token takes, forward and backward, > 0; records then have operations_per_second.
  // See CausalLm::operations_per_token. Where the length of sequences changes, it is that of one length.
  TORCH_ARG(std::optional<double>, operations_per_token);
  // Floating-point operations that the device of one rank can do in a second, in the dtype of the products, > 0; needs
  // operations_per_token. Records then have utilization, the share of all ranks' devices, 1 at most (model FLOPs
  // utilization; arXiv:2204.02311, appendix B).
  TORCH_ARG(std::optional<double>, peak_operations);
};

class Metrics : public Hook {
 public:
  // Throws InvalidArgument for an empty folder name and numbers out of range.
  explicit Metrics(MetricsOptions options);
  Metrics(Metrics&& other) noexcept;
  // Writes the records whose values have arrived; waits for nothing and throws nothing. finish() writes all.
  ~Metrics() override;

  std::string hook_name() const override { return "metrics"; }
  Slot slot() const override { return Slot::record; }
  // Creates the folder. FileError where that cannot be done, or nothing could be written to it.
  void attach(SessionParts& parts) override;
  // Throws, changing nothing, where another run writes to the folder (InvalidArgument), or the table of a run
  // that is resumed has other columns (FileError).
  void start(const Progress& progress) override;
  // Opens the files. FileError where one cannot be read or written, before anything was trained.
  void open(const Progress& progress) override;
  // The clock starts.
  void begin(const Progress& progress, MicroBatch& batch) override;
  // Throws InvalidArgument where two hooks report numbers of the same name.
  void after_step(StepReport& report) override;
  void finish(const Progress& progress) override;
  bool needs_finish() const override { return true; }

  // Writes a line of the user's own to stdout, above the bar where one is drawn. On ranks other than 0 it
  // does nothing and returns false; see Session::print.
  bool print(const std::string& line) override;
  // Takes a number of the user's own for the next record; see Session::record. On ranks other than 0 it keeps
  // nothing.
  bool record(const std::string& name, const at::Tensor& value) override;

 private:
  struct State;
  void write_arrived(bool wait);
  void warn(const std::string& sentence);

  MetricsOptions options_;
  SessionParts* parts_ = nullptr;
  std::unique_ptr<FolderLock> lock_;  // of rank 0, from start to finish
  std::unique_ptr<State> state_;      // from attach on, on rank 0
};

}  // namespace pacer
