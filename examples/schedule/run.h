// A run as its schedules see it, step by step: how many steps there are, what each trains on, at which rate and
// with how many layers. It asks the library's pure functions and has no formula of its own. Options, tables and
// drawings are not here.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <pacer/hooks/batch_schedule.h>
#include <pacer/hooks/progress.h>
#include <pacer/schedulers/layer_drop_rule.h>
#include <pacer/schedulers/learning_rate_schedule.h>
#include <pacer/schedulers/length_schedule.h>

namespace schedule {

// How large each step is. Batches are cut to the length, as by SequenceLength without LengthMode::reshape.
struct StepSizes {
  std::optional<pacer::BatchSchedule> batch;
  std::optional<pacer::LengthSchedule> length;
  // The sequences of one micro-step over all ranks; where there is no length, its tokens. 0: nobody counts tokens.
  int64_t sequences = 0;

  int64_t micro_steps_at(const pacer::Progress& progress) const;
  int64_t length_at(const pacer::Progress& progress) const;
  int64_t tokens_at(const pacer::Progress& progress) const;
};

// A place in the run: what is over.
struct Place {
  int64_t steps = 0;
  int64_t tokens = 0;
};

constexpr int64_t kMostSteps = 10'000'000;
constexpr int64_t kMostTokens = 1'000'000'000'000'000;

// Returns where the run ends: after so many steps, or with the step that reaches so many tokens. One of them is
// given. Throws pacer::InvalidArgument where that is beyond kMostSteps or kMostTokens.
Place end_of_run(const StepSizes& sizes, std::optional<int64_t> steps, std::optional<int64_t> tokens);

struct Run {
  StepSizes sizes;
  Place end;
  double peak;  // of the rate
  pacer::LearningRateSchedule rate;
  bool decays = true;  // sooner or later
  int64_t layers = 0;  // 0: none is dropped
  pacer::LayerDropOptions layer_drop = {};
};

// The step that comes after `steps` others.
struct Row {
  int64_t steps, tokens;
  double rate;
  int64_t micro_steps, length;
  double kept;  // layers in a micro-step, on average
};

struct Course {
  std::vector<Row> table;   // some 20 at round numbers of steps, and the last one
  std::vector<Row> points;  // all steps, or 2,000 at equal distances and the last one
  // The rate's share of the peak: the mean, and what is trained above half of it.
  double mean_over_steps = 0, mean_over_tokens = 0;
  Place above_half;
  // Where warm-up is over, the rate begins to decay, and batch and length change no more. Nothing where that is not
  // in this run.
  std::optional<Place> warmup_end, decay_begin, batch_end, length_end;
  // What the layers compute, as a share of what all of them would: by tokens where they are known.
  double kept_share = 0;
};

Course follow(const Run& run);

}  // namespace schedule
