#include <pacer/schedulers/length_schedule.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
#include <pacer/schedulers/detail/agreement_text.h>

namespace pacer {
namespace {

constexpr int64_t kDefaultDifficultyStep = 8;

// pow lands just below some exact values, 7.999999999999999 instead of 8; this lifts them over it.
constexpr double kLift = 1 + 0x1p-40;

}  // namespace

LengthSchedule::LengthSchedule(int64_t first, int64_t last) : first_(first), last_(last) {
  require(first >= 1, "the first sequence length must be at least 1, not ", first);
  require(first <= last, "the first sequence length (", first, ") must not exceed the last one (", last,
          "); swap them");
}

LengthSchedule& LengthSchedule::ramp_steps(int64_t steps) {
  require(steps >= 0, "ramp_steps of the sequence length must not be negative, but is ", steps);
  LengthSchedule changed = *this;
  changed.ramp_steps_ = steps;
  return become(std::move(changed));
}

LengthSchedule& LengthSchedule::ramp_tokens(int64_t tokens) {
  require(tokens >= 0, "ramp_tokens of the sequence length must not be negative, but is ", tokens);
  LengthSchedule changed = *this;
  changed.ramp_tokens_ = tokens;
  return become(std::move(changed));
}

LengthSchedule& LengthSchedule::root(double root) {
  require(root > 0 && std::isfinite(root), "root of the sequence length must be positive and finite, not ",
          root);
  LengthSchedule changed = *this;
  changed.root_ = root;
  return become(std::move(changed));
}

LengthSchedule& LengthSchedule::difficulty_step(int64_t step) {
  require(step >= 1, "difficulty_step of the sequence length must be at least 1, not ", step);
  LengthSchedule changed = *this;
  changed.difficulty_step_ = step;
  return become(std::move(changed));
}

LengthSchedule& LengthSchedule::table(Table table) {
  require(!table.empty(), "the table of sequence lengths is empty; give {boundary, length} pairs");
  int64_t previous_boundary = -1, previous_length = first_;
  for (const auto& [boundary, length] : table) {
    require(boundary > previous_boundary,
            "the boundaries of the sequence lengths must increase from 0 on, but ", boundary,
            " is not above ", previous_boundary);
    require(length >= previous_length, "the sequence lengths of a table must not decrease, but ", length,
            " at ", boundary, " is below ", previous_length);
    previous_boundary = boundary;
    previous_length = length;
  }
  require(previous_length == last_, "the table of sequence lengths ends at ", previous_length,
          ", but the last length is ", last_, "; make them equal");
  LengthSchedule changed = *this;
  changed.table_ = std::move(table);
  return become(std::move(changed));
}

LengthSchedule& LengthSchedule::custom(Function length) {
  require(length != nullptr, "the custom sequence length is an empty function");
  LengthSchedule changed = *this;
  changed.custom_ = std::move(length);
  return become(std::move(changed));
}

LengthSchedule& LengthSchedule::by_tokens() {
  LengthSchedule changed = *this;
  changed.by_tokens_ = true;
  return become(std::move(changed));
}

LengthSchedule& LengthSchedule::become(LengthSchedule changed) {
  changed.refuse_contradictions();
  return *this = std::move(changed);
}

void LengthSchedule::refuse_contradictions() const {
  require(!(ramp_steps_ && ramp_tokens_),
          "the sequence length was given ramp_steps and ramp_tokens; give the one that it shall follow");
  require(has_ramp() + !table_.empty() + (custom_ != nullptr) <= 1,
          "the sequence length was given more than one of a ramp, a table and a custom function; give one");
  require(
      !root_ || (table_.empty() && !custom_),
      "root of the sequence length bends a ramp; leave it out where there is a table or a custom function");
  require(!difficulty_step_ || table_.empty(),
          "the sequence lengths of a table are taken as written; leave difficulty_step out");
  require(
      !by_tokens_ || !has_ramp(),
      "by_tokens of the sequence length is for tables and custom functions; a ramp by tokens is ramp_tokens");
}

void LengthSchedule::validate() const {
  require(has_ramp() || !table_.empty() || custom_ != nullptr, "the sequence length has no way from ", first_,
          " to ", last_, "; give ramp_steps, ramp_tokens, a table or a custom function");
}

int64_t LengthSchedule::length(const Progress& progress) const {
  validate();
  const int64_t q = position(progress);
  if (custom_) return rounded(custom_(q));
  return table_.empty() ? ramp_length(q) : table_length(q);
}

bool LengthSchedule::settled(const Progress& progress) const {
  validate();
  if (custom_) return length(progress) == last_;
  const int64_t end = table_.empty() ? ramp_steps_.value_or(ramp_tokens_.value_or(0)) : table_.back().first;
  return position(progress) >= end;
}

std::string LengthSchedule::describe() const {
  std::string text = detail::concatenate(first_, " to ", last_);
  const int64_t multiple = difficulty_step_.value_or(kDefaultDifficultyStep);
  if (has_ramp()) {
    text += detail::concatenate(" over ", ramp_steps_.value_or(ramp_tokens_.value_or(0)),
                                ramp_steps_ ? " steps" : " tokens", ", root ", exact_text(root_.value_or(1)),
                                ", in multiples of ", multiple);
  }
  const char* unit = by_tokens_ ? " tokens" : " steps";
  for (const auto& [boundary, length] : table_) {
    text += detail::concatenate(", ", length, " from ", boundary, unit, " on");
  }
  if (custom_) {
    text += detail::concatenate(" by a function of", unit, ", in multiples of ", multiple, ": ",
                                detail::sampled([&](const Progress& at) { return length(at); }));
  }
  return text;
}

int64_t LengthSchedule::position(const Progress& progress) const {
  require(progress.step >= 0 && progress.tokens >= 0, "a sequence length was asked for step ", progress.step,
          " and token ", progress.tokens, "; both count from 0");
  return ramp_tokens_ || by_tokens_ ? progress.tokens : progress.step;
}

int64_t LengthSchedule::rounded(int64_t length) const {
  if (length <= first_) return first_;
  length -= length % difficulty_step_.value_or(kDefaultDifficultyStep);
  return std::clamp(length, first_, last_);
}

int64_t LengthSchedule::ramp_length(int64_t position) const {
  const int64_t end = ramp_steps_.value_or(ramp_tokens_.value_or(0));
  if (position >= end) return last_;
  double share = static_cast<double>(position) / static_cast<double>(end);
  if (const double root = root_.value_or(1); root != 1) share = std::pow(share, 1 / root);
  const double length = (static_cast<double>(first_) + static_cast<double>(last_ - first_) * share) * kLift;
  const bool representable = length < 0x1p63;
  return rounded(representable ? static_cast<int64_t>(length) : std::numeric_limits<int64_t>::max());
}

int64_t LengthSchedule::table_length(int64_t position) const {
  int64_t length = first_;
  for (const auto& [boundary, from_here] : table_) {
    if (position < boundary) break;
    length = from_here;
  }
  return length;
}

}  // namespace pacer
