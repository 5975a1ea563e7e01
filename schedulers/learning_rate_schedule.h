// Learning-rate schedules as pure functions: progress in, factor of the base rate out. A schedule holds no
// state, so there is nothing to save and nothing to lose at resume. Applying the factor to an optimizer is
// not done here: see FactorLR and the LearningRate hook.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <torch/arg.h>

#include <pacer/hooks/progress.h>

namespace pacer {

// The way from start_factor to 1 over the warm-up steps, at step k = 1 ... w.
enum class WarmUp {
  linear,       // start + (1 - start) k / w
  logarithmic,  // start + (1 - start) log(1 + k) / log(1 + w)
};

// The way down from 1; see the function of the same name below.
enum class Decay {
  constant,
  linear,
  cosine,
  polynomial,
  exponential,
  inverse_sqrt,
  minus_sqrt,  // of warmup_stable_decay, as the next one
  halving,
  cosine_restarts,
  one_cycle,         // up and down by cosine
  one_cycle_linear,  // up and down by a line
  custom,            // a function of steps: of custom_schedule
  custom_by_tokens   // a function of tokens
};

// What a schedule is made of. Built in place, {warm-up steps, total steps}, or by setters that chain:
// LearningRateScheduleOptions(1'000).total_tokens(4'000'000'000).end_factor(0.1). A setting that a schedule
// has no use for is refused by it, so that none is silently without effect.
struct LearningRateScheduleOptions {
  // NOLINTNEXTLINE(google-explicit-constructor): warmup_inverse_sqrt({1'000}) is meant to compile.
  LearningRateScheduleOptions(int64_t warmup_steps = 0) : warmup_steps_(warmup_steps) {}
  LearningRateScheduleOptions(int64_t warmup_steps, int64_t total_steps)
      : warmup_steps_(warmup_steps), total_steps_(total_steps) {}
  // How many steps the warm-up takes, >= 0.
  TORCH_ARG(int64_t, warmup_steps) = 0;
  // Where warm-up starts, in [0, 1]; 0 unless set, and 0.04 in one_cycle.
  TORCH_ARG(std::optional<double>, start_factor);
  // The way of the warm-up, WarmUp::linear unless set. A one_cycle has a way of its own.
  TORCH_ARG(std::optional<WarmUp>, warm_up);
  // The step at which the decay arrives at end_factor, warm-up included, and so at least its length. It stays
  // there afterwards. A one_cycle arrives one step earlier, with the last of them.
  TORCH_ARG(std::optional<int64_t>, total_steps);
  // Instead of total_steps: decay by tokens trained, from the first token on; warm-up stays by steps and
  // multiplies it.
  TORCH_ARG(std::optional<int64_t>, total_tokens);
  // The last steps of total_steps, which decay, at most all behind the warm-up; before them the factor stays
  // 1. All decay where this is not set.
  TORCH_ARG(std::optional<int64_t>, decay_steps);
  // The same of total_tokens, in tokens.
  TORCH_ARG(std::optional<int64_t>, decay_tokens);
  // Where the decay ends, in [0, 1]; 0 unless set, and 4e-6 in one_cycle.
  TORCH_ARG(std::optional<double>, end_factor);
  // Polynomial only: the exponent, > 0; 1 unless set.
  TORCH_ARG(std::optional<double>, power);
  // Exponential only: the factor of one decay, in (0, 1]; needed.
  TORCH_ARG(std::optional<double>, gamma);
  // Exponential only: steps between two decays, >= 1; 1 unless set.
  TORCH_ARG(std::optional<int64_t>, every);
  // Restarts only: the steps of the first cycle, >= 1; needed.
  TORCH_ARG(std::optional<int64_t>, cycle_steps);
  // Restarts only: how many times as long as the one before each further cycle is, >= 1; 1 unless set.
  TORCH_ARG(std::optional<int64_t>, cycle_growth);
};

// A value: copy it freely. Every factor is a finite multiple of the base rate in [0, 1], of a custom schedule in
// [0, inf), computed in double.
class LearningRateSchedule {
 public:
  // From the attempts completed, or the tokens trained on, to a factor; must be pure, and answer for every number.
  using Function = std::function<double(int64_t progress)>;

  // Throws InvalidArgument for options that are out of range, missing, or of no use to this decay, and for one that
  // is a function, which custom_schedule takes.
  LearningRateSchedule(Decay decay, const LearningRateScheduleOptions& options);

  // Returns a chain: this schedule for the first `step` attempts, and from there on `next`, whose progress
  // begins at 0 there, as in torch's SequentialLR. A chain takes further parts, always at a step of the whole
  // run: a.then(100, b).then(200, c). Throws InvalidArgument for a step below 1, or not behind those at which
  // parts of this chain begin, and for a `next` that is a chain itself, or follows tokens, since the token
  // that it would begin at is not known.
  LearningRateSchedule then(int64_t step, const LearningRateSchedule& next) const;

  // Returns the same with a `next` that takes over once so many tokens are trained on, counted as the steps
  // are. It must be constant or follow tokens, without a warm-up, since the step that it would begin at is not
  // known.
  LearningRateSchedule then_at_token(int64_t tokens, const LearningRateSchedule& next) const;

  // The factor for the step that comes after `progress.step` attempts. Throws InvalidArgument where progress
  // is negative, and where a custom schedule gives no number, or a negative one.
  double factor(const Progress& progress) const;

  // Whether the step that comes next is beyond the warm-up, and no later part of a chain has one. It asks for
  // the step alone: a part that ends at a token may have all of its warm-up still to come.
  bool warmup_ended(const Progress& progress) const;

  // Whether the factor stays what it is for the step that comes next. It never does in restarts, in decays
  // without an end and in custom schedules.
  bool has_ended(const Progress& progress) const;

  // The number of steps after which the factor is and stays 0; none where it never is, or follows tokens.
  std::optional<int64_t> steps_until_zero() const;

  // All of it in words and numbers: equal for equal schedules, different for others. A custom schedule by its values
  // at some thousand points.
  std::string describe() const;

  // Whether a decay or a custom schedule follows tokens instead of steps, or a part of a chain begins at a token.
  bool by_tokens() const;

 private:
  struct Former;
  friend LearningRateSchedule custom_schedule(Function factor);
  friend LearningRateSchedule custom_schedule_by_tokens(Function factor);

  LearningRateSchedule(Function custom, Decay decay);
  LearningRateSchedule followed_by(const LearningRateSchedule& next, int64_t until, bool by_tokens) const;
  Progress since_last_began(const Progress& progress) const;
  // These look at the last part of a chain alone, and take the progress since it began.
  double last_factor(const Progress& progress) const;
  double warmup_factor(int64_t step) const;
  double warmed_up_share(int64_t step) const;
  double decay_factor(const Progress& progress) const;
  double decayed_share(const Progress& progress) const;
  int64_t end_of_decay() const;
  double share_of_cycle(int64_t steps) const;
  double start_factor() const;
  double end_factor() const;
  double custom_factor(int64_t progress) const;
  bool follows_tokens() const;

  Decay decay_;
  LearningRateScheduleOptions options_;
  Function custom_;
  // What comes before the last part of a chain; nothing where there is one part.
  std::shared_ptr<const Former> former_;
};

// What each is after the warm-up of w steps, with q attempts completed and x = (q - w) / (N - w) in [0, 1]
// for a total of N steps, or x = the share of total_tokens trained on. With decay_steps or decay_tokens, x is
// the share of those that is over.

// 1
LearningRateSchedule constant_schedule(const LearningRateScheduleOptions& options = {});
// end + (1 - end) (1 - x)
LearningRateSchedule warmup_linear(const LearningRateScheduleOptions& options);
// end + (1 - end) (1 + cos(pi x)) / 2
LearningRateSchedule warmup_cosine(const LearningRateScheduleOptions& options);
// end + (1 - end) (1 - x)^power
LearningRateSchedule warmup_polynomial(const LearningRateScheduleOptions& options);
// gamma^floor((q - w) / every)
LearningRateSchedule warmup_exponential(const LearningRateScheduleOptions& options);
// sqrt(max(w, 1) / (q + 1))
LearningRateSchedule warmup_inverse_sqrt(const LearningRateScheduleOptions& options);

// 1, and from the last decay_steps (or decay_tokens) on, which must be given, linear, cosine or polynomial as
// above, or Decay::minus_sqrt, end + (1 - end) (1 - sqrt(x)), or Decay::halving, end + (1 - end) (2^(1 - x) -
// 1), which Megatron-LM calls exponential. A run that was saved before its decay can go on with another end.
LearningRateSchedule warmup_stable_decay(const LearningRateScheduleOptions& options,
                                         Decay decay = Decay::linear);
// end + (1 - end) (1 + cos(pi t / T)) / 2, with t steps of a cycle of T steps completed. The first cycle
// begins behind the warm-up (Loshchilov & Hutter, arXiv:1608.03983).
LearningRateSchedule warmup_cosine_restarts(const LearningRateScheduleOptions& options);
// The values of torch's OneCycleLR in two phases (Smith & Topin, arXiv:1708.07120), whose max_lr is the base
// rate and whose pct_start is w / N. With u(x) = (1 - cos(pi x)) / 2 for Decay::cosine and x for
// Decay::linear, which `anneal` must be one of: start + (1 - start) u(q / (w - 1)) up to q = w - 1, from there
// 1 + (end - 1) u((q - w + 1) / (N - w)), and end from q = N - 1 on. Needs w >= 1 and total_steps, more than w.
LearningRateSchedule one_cycle(const LearningRateScheduleOptions& options, Decay anneal = Decay::cosine);

// A function of the attempts completed, finite and not negative; above 1 it is a multiple of the base rate. Every rank
// gives the same function, and so does a run that goes on. It counts as a schedule without a warm-up: where 1-bit
// optimizers freeze by themselves, they do not wait for it. Throws InvalidArgument for an empty function.
LearningRateSchedule custom_schedule(LearningRateSchedule::Function factor);
// The same as a function of the tokens trained on, over all ranks.
LearningRateSchedule custom_schedule_by_tokens(LearningRateSchedule::Function factor);

}  // namespace pacer
