// A sequence-length curriculum (Li et al., arXiv:2108.06084): training starts with short sequences and grows
// to the full length; attention gets cheaper and early training steadier.
//
//   session.use(pacer::SequenceLength(pacer::SequenceLengthOptions(64, 1024).ramp_steps(10'000)));
//
// Session::begin hands out batches of the length that progress asks for. Evaluation stays at full length.
// Which dimensions of which tensor are sequence: dimension 1 of a tensor with two or three dimensions,
// [batch, sequence, ...]; dimensions 2 and 3 of one with four, [batch, heads or 1, sequence, sequence] (a
// mask); none of a tensor with one. `dimensions` says otherwise.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <torch/arg.h>

#include <pacer/hooks/hook.h>
#include <pacer/hooks/once_on_first_rank.h>
#include <pacer/schedulers/length_schedule.h>

namespace pacer {

// What becomes of the tokens beyond the length.
enum class LengthMode {
  truncate,  // cut off: fewer tokens in the batch
  reshape,   // the batch becomes more, shorter sequences; fewer tokens than one sequence are dropped
};

// A LengthSchedule and how it is applied. Setters chain.
class SequenceLengthOptions {
 public:
  // Lengths in tokens; 1 <= first <= last.
  SequenceLengthOptions(int64_t first, int64_t last) : schedule_(first, last) {}
  SequenceLengthOptions(LengthSchedule schedule) : schedule_(std::move(schedule)) {}

  // See LengthSchedule.
  SequenceLengthOptions& ramp_steps(int64_t steps) { return after(schedule_.ramp_steps(steps)); }
  SequenceLengthOptions& ramp_tokens(int64_t tokens) { return after(schedule_.ramp_tokens(tokens)); }
  SequenceLengthOptions& root(double root) { return after(schedule_.root(root)); }
  SequenceLengthOptions& difficulty_step(int64_t step) { return after(schedule_.difficulty_step(step)); }
  SequenceLengthOptions& table(LengthSchedule::Table t) { return after(schedule_.table(std::move(t))); }
  const LengthSchedule& schedule() const { return schedule_; }

  // What becomes of the tokens beyond the length.
  TORCH_ARG(LengthMode, mode) = LengthMode::truncate;
  // The sequence dimensions of each tensor of the batch, in order; {} for a tensor without.
  TORCH_ARG(std::vector<std::vector<int64_t>>, dimensions);
  // Batches may be shorter than the length asked for (padded to their longest sequence, for example).
  // Otherwise that is an error.
  TORCH_ARG(bool, allow_shorter) = false;

 private:
  SequenceLengthOptions& after(const LengthSchedule&) { return *this; }

  LengthSchedule schedule_;
};

class SequenceLength : public Hook {
 public:
  // Throws InvalidArgument for a schedule without a way from first to last.
  explicit SequenceLength(SequenceLengthOptions options);

  std::string hook_name() const override { return "sequence_length"; }
  Slot slot() const override { return Slot::data; }
  bool settled(const Progress& progress) const override { return options_.schedule().settled(progress); }
  std::string agreement() const override;
  void attach(SessionParts& parts) override;
  // Says once, on stderr, what it cuts of each tensor. Throws InvalidArgument where a tensor has no such
  // dimension, or another length there than the rest.
  void begin(const Progress& progress, MicroBatch& batch) override;
  void after_step(StepReport& report) override;

 private:
  std::vector<int64_t> dimensions_of(size_t index, const at::Tensor& tensor) const;

  SequenceLengthOptions options_;
  void describe_cuts(const MicroBatch& batch, const std::vector<std::vector<int64_t>>& dimensions,
                     int64_t full, int64_t length) const;

  int64_t length_ = 0;  // of the last micro-batch
  OnceOnFirstRank describes_;
};

// The two rules themselves, for a loop without a Session; the results are contiguous. `dimensions`: sequence
// dimensions of the tensor, all of size L >= length.
at::Tensor truncate_sequence(const at::Tensor& tensor, const std::vector<int64_t>& dimensions,
                             int64_t length);
// [B, L, ...] to [floor(B L / length), length, ...].
at::Tensor reshape_sequence(const at::Tensor& tensor, int64_t length);

}  // namespace pacer
