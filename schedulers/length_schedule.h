// The sequence-length curriculum (Li et al., "The stability-efficiency dilemma", arXiv:2108.06084) as a pure
// function: progress in, length out. It holds no state, so there is nothing to lose at resume. Cutting
// batches to the length is not done here.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/hooks/progress.h>

namespace pacer {

// The length grows from `first` to `last`, both in tokens per sequence. It grows by one of these: a ramp
// (ramp_steps or ramp_tokens, with or without root), a table, a custom function. Setters chain:
// LengthSchedule(64, 1024).ramp_steps(10'000).root(2). Every setter throws InvalidArgument, changing nothing,
// where its value is out of range or contradicts an earlier one.
class LengthSchedule {
 public:
  // {progress from which on it holds, length}
  using Table = std::vector<std::pair<int64_t, int64_t>>;
  // From progress (in steps, or in tokens after by_tokens) to a length; must be pure and must not decrease.
  using Function = std::function<int64_t(int64_t progress)>;

  // Throws InvalidArgument unless 1 <= first <= last.
  LengthSchedule(int64_t first, int64_t last);

  // Grows over this many steps, or tokens trained; 0 means `last` at once.
  LengthSchedule& ramp_steps(int64_t steps);
  LengthSchedule& ramp_tokens(int64_t tokens);
  // The ramp is first + (last - first) * share^(1/root): 1, the default, is linear; 2 grows fast at first.
  LengthSchedule& root(double root);
  // Lengths between `first` and `last` are rounded down to a multiple of this; 8 unless set. Not for tables.
  LengthSchedule& difficulty_step(int64_t step);
  // `first` before the first boundary, then the length of the last boundary reached, as written. Boundaries
  // increase, lengths do not decrease, and the last one is `last`.
  LengthSchedule& table(Table table);
  // What it returns is rounded down to difficulty_step, then clamped to [first, last].
  LengthSchedule& custom(Function length);
  // The boundaries of the table, or the argument of the custom function, count tokens trained, not steps.
  LengthSchedule& by_tokens();

  // Throws InvalidArgument where no way from first to last was chosen.
  void validate() const;

  // The length for the step that comes next, in [first, last]. Throws like validate(), and where progress is
  // negative.
  int64_t length(const Progress& progress) const;

  // Whether the curriculum has ended: the ramp or table is over, or the custom function has reached `last`.
  bool settled(const Progress& progress) const;

  // All of it in words and numbers: equal for equal schedules, different for others. A custom function by its
  // values at some thousand points.
  std::string describe() const;

  int64_t first() const { return first_; }
  int64_t last() const { return last_; }

 private:
  LengthSchedule& become(LengthSchedule changed);
  void refuse_contradictions() const;
  bool has_ramp() const { return ramp_steps_.has_value() || ramp_tokens_.has_value(); }
  int64_t position(const Progress& progress) const;
  int64_t rounded(int64_t length) const;
  int64_t ramp_length(int64_t position) const;
  int64_t table_length(int64_t position) const;

  int64_t first_, last_;
  std::optional<int64_t> ramp_steps_, ramp_tokens_, difficulty_step_;
  std::optional<double> root_;
  Table table_;
  Function custom_;
  bool by_tokens_ = false;
};

}  // namespace pacer
