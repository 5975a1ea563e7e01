#include "run.h"

#include <algorithm>

#include <pacer/core/error.h>

#include "support/round_numbers.h"

namespace schedule {
namespace {

// The sum over the layers of a stack, each with its own probability.
double kept_layers(const Run& run, const pacer::Progress& progress) {
  double kept = 0;
  for (int64_t layer = 0; layer < run.layers; ++layer) {
    kept += pacer::keep_probability(run.layer_drop, layer, run.layers, progress);
  }
  return kept;
}

}  // namespace

int64_t StepSizes::micro_steps_at(const pacer::Progress& progress) const {
  return batch ? batch->micro_steps(progress) : 1;
}

int64_t StepSizes::length_at(const pacer::Progress& progress) const {
  return length ? length->length(progress) : 1;
}

int64_t StepSizes::tokens_at(const pacer::Progress& progress) const {
  return micro_steps_at(progress) * sequences * length_at(progress);
}

Place end_of_run(const StepSizes& sizes, std::optional<int64_t> steps, std::optional<int64_t> tokens) {
  pacer::Progress progress;
  const auto goes_on = [&] { return steps ? progress.step < *steps : progress.tokens < *tokens; };
  for (; goes_on(); ++progress.step) {
    pacer::require(progress.step < kMostSteps, "after ", kMostSteps, " steps only ", progress.tokens, " of ",
                   tokens.value_or(0),
                   " tokens are trained on; give more --tokens-per-step or fewer --tokens");
    progress.tokens += sizes.tokens_at(progress);
    pacer::require(progress.tokens <= kMostTokens, "step ", progress.step, " goes beyond ", kMostTokens,
                   " tokens; give fewer --tokens-per-step, or a shorter run");
  }
  return {progress.step, progress.tokens};
}

Course follow(const Run& run) {
  constexpr int kRows = 20;
  constexpr int64_t kPoints = 2'000;
  const int64_t steps = run.end.steps, apart = (steps + kPoints - 1) / kPoints;
  const auto rows_apart =
      std::max<int64_t>(1, static_cast<int64_t>(examples::round_interval(static_cast<double>(steps), kRows)));
  Course course;
  double factors = 0, factors_by_tokens = 0, computed = 0, all = 0;
  const auto note = [](std::optional<Place>& event, bool happened, const pacer::Progress& progress) {
    if (happened && !event) event = Place{progress.step, progress.tokens};
  };
  for (pacer::Progress progress; progress.step < steps; ++progress.step) {
    const double factor = run.rate.factor(progress);
    const Row row = {progress.step,
                     progress.tokens,
                     run.peak * factor,
                     run.sizes.micro_steps_at(progress),
                     run.sizes.length_at(progress),
                     kept_layers(run, progress)};
    const int64_t tokens = run.sizes.tokens_at(progress);
    note(course.warmup_end, run.rate.warmup_ended(progress), progress);
    note(course.decay_begin, run.rate.warmup_ended(progress) && factor < 1, progress);
    note(course.batch_end, run.sizes.batch && run.sizes.batch->settled(progress), progress);
    note(course.length_end, run.sizes.length && run.sizes.length->settled(progress), progress);
    factors += factor;
    factors_by_tokens += factor * static_cast<double>(tokens);
    if (factor > 0.5) course.above_half = {course.above_half.steps + 1, course.above_half.tokens + tokens};
    // In proportion to the tokens, also where nobody counts them.
    const double size = static_cast<double>(row.micro_steps) * static_cast<double>(row.length);
    computed += size * row.kept;
    all += size * static_cast<double>(run.layers);
    const bool is_last = progress.step == steps - 1;
    if (progress.step % rows_apart == 0 || is_last) course.table.push_back(row);
    if (progress.step % apart == 0 || is_last) course.points.push_back(row);
    progress.tokens += tokens;
  }
  course.mean_over_steps = factors / static_cast<double>(steps);
  if (run.end.tokens > 0) course.mean_over_tokens = factors_by_tokens / static_cast<double>(run.end.tokens);
  if (all > 0) course.kept_share = computed / all;
  return course;
}

}  // namespace schedule
