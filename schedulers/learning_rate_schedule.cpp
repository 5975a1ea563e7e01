#include <pacer/schedulers/learning_rate_schedule.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
#include <pacer/schedulers/detail/agreement_text.h>
#include <pacer/schedulers/detail/rate_schedule_options.h>

namespace pacer {
namespace {

constexpr double kPi = 3.141592653589793238462643383279502884;
// What torch has by default: 1 / div_factor, and that divided by final_div_factor.
constexpr double kOneCycleStart = 0.04, kOneCycleEnd = 4e-6;

}  // namespace

// What a part of a chain takes over from, and where: at a token or at a step.
struct LearningRateSchedule::Former {
  LearningRateSchedule schedule;
  int64_t until;
  bool by_tokens;

  bool is_over(const Progress& progress) const {
    return (by_tokens ? progress.tokens : progress.step) >= until;
  }
};

LearningRateSchedule::LearningRateSchedule(Decay decay, const LearningRateScheduleOptions& options)
    : decay_(decay), options_(options) {
  detail::check_rate_schedule_options(decay, options);
}

LearningRateSchedule::LearningRateSchedule(Function custom, Decay decay)
    : decay_(decay), custom_(std::move(custom)) {
  require(custom_ != nullptr, detail::rate_schedule_name(decay),
          " was given an empty function; give one that returns the factor");
}

LearningRateSchedule LearningRateSchedule::then(int64_t step, const LearningRateSchedule& next) const {
  return followed_by(next, step, /*by_tokens=*/false);
}

LearningRateSchedule LearningRateSchedule::then_at_token(int64_t tokens,
                                                         const LearningRateSchedule& next) const {
  return followed_by(next, tokens, /*by_tokens=*/true);
}

LearningRateSchedule LearningRateSchedule::followed_by(const LearningRateSchedule& next, int64_t until,
                                                       bool by_tokens) const {
  const char* call = by_tokens ? "then_at_token" : "then";
  const char* unit = by_tokens ? "token " : "step ";
  require(!next.former_, call,
          " was given a chain of schedules to go on with; append its parts one after the other");
  require(until >= 1, call, ": a part of a chain begins at ", unit, "1 or later, not at ", unit, until);
  for (const Former* former = former_.get(); former; former = former->schedule.former_.get()) {
    require(former->by_tokens != by_tokens || until > former->until, call, ": ", unit, until,
            " does not come after ", unit, former->until,
            ", at which an earlier part of the chain begins; append parts in the order in which they begin");
  }
  const char* name = detail::rate_schedule_name(next.decay_);
  if (by_tokens) {
    const bool follows_steps = next.decay_ != Decay::constant && !next.follows_tokens();
    require(!follows_steps && next.options_.warmup_steps() == 0, call, ": ", name,
            " has a warm-up or a decay by steps, but the step at which token ", until,
            " comes is not known; let it begin at a step, with then, or give one without a warm-up that is "
            "constant or follows tokens");
  } else {
    require(!next.follows_tokens(), call, ": ", name, " follows tokens, but the token at which step ", until,
            " comes is not known; let it begin at a token, with then_at_token");
  }
  LearningRateSchedule chain = next;
  chain.former_ = std::make_shared<const Former>(Former{*this, until, by_tokens});
  return chain;
}

bool LearningRateSchedule::by_tokens() const {
  return follows_tokens() || (former_ && (former_->by_tokens || former_->schedule.by_tokens()));
}

// Of the last part of a chain.
bool LearningRateSchedule::follows_tokens() const {
  return options_.total_tokens() || decay_ == Decay::custom_by_tokens;
}

double LearningRateSchedule::start_factor() const {
  return options_.start_factor().value_or(detail::is_one_cycle(decay_) ? kOneCycleStart : 0);
}

double LearningRateSchedule::end_factor() const {
  return options_.end_factor().value_or(detail::is_one_cycle(decay_) ? kOneCycleEnd : 0);
}

std::string LearningRateSchedule::describe() const {
  const auto& o = options_;
  std::string text;
  if (former_) {
    text = detail::concatenate(former_->schedule.describe(), "; from ",
                               former_->by_tokens ? "token " : "step ", former_->until, " on ");
  }
  if (custom_) {
    return text + detail::concatenate(detail::rate_schedule_name(decay_), ": ",
                                      detail::sampled([this](const Progress& at) {
                                        return exact_text(custom_(follows_tokens() ? at.tokens : at.step));
                                      }));
  }
  const char* way = o.warm_up() == WarmUp::logarithmic ? "logarithmic " : "linear ";
  text +=
      detail::concatenate(detail::rate_schedule_name(decay_), ", ", detail::is_one_cycle(decay_) ? "" : way,
                          "warm-up of ", o.warmup_steps(), " steps from ", exact_text(start_factor()));
  const auto add = [&](const char* name, const auto& value) {
    if (value) text += detail::concatenate(", ", name, ' ', exact_text(double(*value)));
  };
  add("total_steps", o.total_steps());
  add("total_tokens", o.total_tokens());
  add("decay_steps", o.decay_steps());
  add("decay_tokens", o.decay_tokens());
  add("end_factor", detail::is_one_cycle(decay_) ? std::optional(end_factor()) : o.end_factor());
  add("power", o.power());
  add("gamma", o.gamma());
  add("every", o.every());
  add("cycle_steps", o.cycle_steps());
  add("cycle_growth", o.cycle_growth());
  return text;
}

std::optional<int64_t> LearningRateSchedule::steps_until_zero() const {
  const bool has_an_end = detail::has_an_end(decay_) || detail::is_one_cycle(decay_);
  if (!has_an_end || end_factor() != 0 || !options_.total_steps()) return std::nullopt;
  const int64_t steps = end_of_decay();
  if (!former_) return steps;
  // A part that begins at a token has no total_steps. A sum that is too large is beyond all steps.
  if (former_->until > std::numeric_limits<int64_t>::max() - steps) return std::nullopt;
  return former_->until + steps;
}

bool LearningRateSchedule::warmup_ended(const Progress& progress) const {
  const int64_t warmup_steps = options_.warmup_steps();
  if (!former_) return progress.step >= warmup_steps;
  if (!former_->by_tokens && former_->is_over(progress))
    return progress.step - former_->until >= warmup_steps;
  return warmup_steps == 0 && former_->schedule.warmup_ended(progress);
}

bool LearningRateSchedule::has_ended(const Progress& progress) const {
  if (former_ && !former_->is_over(progress)) return false;
  const Progress own = since_last_began(progress);
  if (own.step < options_.warmup_steps()) return false;
  const bool stays_at_one =
      decay_ == Decay::constant || (decay_ == Decay::exponential && *options_.gamma() == 1);
  const bool has_an_end = detail::has_an_end(decay_) || detail::is_one_cycle(decay_);
  return stays_at_one || (has_an_end && decayed_share(own) == 1);
}

Progress LearningRateSchedule::since_last_began(const Progress& progress) const {
  Progress own = progress;
  if (former_) (former_->by_tokens ? own.tokens : own.step) -= former_->until;
  return own;
}

double LearningRateSchedule::factor(const Progress& progress) const {
  require(progress.step >= 0 && progress.tokens >= 0, "a learning-rate schedule was asked for step ",
          progress.step, " and token ", progress.tokens, "; both count from 0");
  if (former_ && !former_->is_over(progress)) return former_->schedule.factor(progress);
  return last_factor(since_last_began(progress));
}

double LearningRateSchedule::last_factor(const Progress& progress) const {
  if (progress.step >= options_.warmup_steps()) return decay_factor(progress);
  const double warmup = warmup_factor(progress.step);
  return options_.total_tokens() ? warmup * decay_factor(progress) : warmup;
}

double LearningRateSchedule::warmup_factor(int64_t step) const {
  const double start = start_factor();
  return start + (1 - start) * warmed_up_share(step);
}

// `step` is below warmup_steps, which is therefore positive.
double LearningRateSchedule::warmed_up_share(int64_t step) const {
  const int64_t steps = options_.warmup_steps();
  if (detail::is_one_cycle(decay_)) {
    const double way = steps == 1 ? 1 : static_cast<double>(step) / static_cast<double>(steps - 1);
    return decay_ == Decay::one_cycle ? (1 - std::cos(kPi * way)) / 2 : way;
  }
  const double k = static_cast<double>(step) + 1, w = static_cast<double>(steps);
  return std::min(options_.warm_up() == WarmUp::logarithmic ? std::log1p(k) / std::log1p(w) : k / w, 1.0);
}

double LearningRateSchedule::decay_factor(const Progress& progress) const {
  const auto from_one_to_end = [this](double left) {  // left: 1 before the decay, 0 after it
    const double end = end_factor();
    return end + (1 - end) * left;
  };
  const int64_t warmup_steps = options_.warmup_steps();
  switch (decay_) {
    case Decay::constant:
      return 1;
    case Decay::linear:
    case Decay::one_cycle_linear:
      return from_one_to_end(1 - decayed_share(progress));
    case Decay::cosine:
    case Decay::one_cycle:
      return from_one_to_end((1 + std::cos(kPi * decayed_share(progress))) / 2);
    case Decay::polynomial:
      return from_one_to_end(std::pow(1 - decayed_share(progress), options_.power().value_or(1)));
    case Decay::exponential: {
      const int64_t decays = (progress.step - warmup_steps) / options_.every().value_or(1);
      return std::pow(*options_.gamma(), static_cast<double>(decays));
    }
    case Decay::minus_sqrt:
      return from_one_to_end(1 - std::sqrt(decayed_share(progress)));
    case Decay::halving:
      return from_one_to_end(std::exp2(1 - decayed_share(progress)) - 1);
    case Decay::cosine_restarts:
      return from_one_to_end((1 + std::cos(kPi * share_of_cycle(progress.step - warmup_steps))) / 2);
    case Decay::custom:
      return custom_factor(progress.step);
    case Decay::custom_by_tokens:
      return custom_factor(progress.tokens);
    case Decay::inverse_sqrt: {
      const double k = static_cast<double>(progress.step) + 1;
      const double least = std::max(static_cast<double>(warmup_steps), 1.0);
      return std::sqrt(least / std::max(k, least));
    }
  }
  return 1;  // not reached: the constructor refuses other values
}

double LearningRateSchedule::custom_factor(int64_t progress) const {
  const double factor = custom_(progress);
  require(std::isfinite(factor) && factor >= 0, detail::rate_schedule_name(decay_), " gave ", factor, " at ",
          decay_ == Decay::custom ? "step " : "token ", progress,
          "; a factor of the learning rate is finite and not negative");
  return factor;
}

// x of the header, in [0, 1].
double LearningRateSchedule::decayed_share(const Progress& progress) const {
  const auto& o = options_;
  // The last `part` of `whole`, of which so much is over.
  const auto share = [](int64_t over, int64_t whole, int64_t part) {
    if (over >= whole) return 1.0;
    if (over <= whole - part) return 0.0;  // a part of 0 has ended before, or begins at the end
    return static_cast<double>(over - (whole - part)) / static_cast<double>(part);
  };
  if (o.total_tokens())
    return share(progress.tokens, *o.total_tokens(), o.decay_tokens().value_or(*o.total_tokens()));
  const int64_t behind_warmup = *o.total_steps() - o.warmup_steps();
  return share(progress.step, end_of_decay(), o.decay_steps().value_or(behind_warmup));
}

// The step from which on a decay by steps is at its end: a one_cycle arrives there with the last of its
// total_steps, all others behind it.
int64_t LearningRateSchedule::end_of_decay() const {
  return *options_.total_steps() - (detail::is_one_cycle(decay_) ? 1 : 0);
}

// t / T of the header, with so many steps behind the warm-up completed.
double LearningRateSchedule::share_of_cycle(int64_t steps) const {
  const int64_t growth = options_.cycle_growth().value_or(1);
  int64_t cycle = *options_.cycle_steps();
  if (growth == 1) return static_cast<double>(steps % cycle) / static_cast<double>(cycle);
  while (steps >= cycle) {
    steps -= cycle;
    // A cycle that no count of steps reaches the end of.
    cycle = cycle > std::numeric_limits<int64_t>::max() / growth ? std::numeric_limits<int64_t>::max()
                                                                 : cycle * growth;
  }
  return static_cast<double>(steps) / static_cast<double>(cycle);
}

LearningRateSchedule constant_schedule(const LearningRateScheduleOptions& options) {
  return {Decay::constant, options};
}
LearningRateSchedule warmup_linear(const LearningRateScheduleOptions& options) {
  return {Decay::linear, options};
}
LearningRateSchedule warmup_cosine(const LearningRateScheduleOptions& options) {
  return {Decay::cosine, options};
}
LearningRateSchedule warmup_polynomial(const LearningRateScheduleOptions& options) {
  return {Decay::polynomial, options};
}
LearningRateSchedule warmup_exponential(const LearningRateScheduleOptions& options) {
  return {Decay::exponential, options};
}
LearningRateSchedule warmup_inverse_sqrt(const LearningRateScheduleOptions& options) {
  return {Decay::inverse_sqrt, options};
}
LearningRateSchedule warmup_stable_decay(const LearningRateScheduleOptions& options, Decay decay) {
  require(detail::has_an_end(decay),
          "warmup_stable_decay decays by linear, cosine, polynomial, minus_sqrt or halving");
  require(options.decay_steps() || options.decay_tokens(),
          "warmup_stable_decay needs decay_steps, how many of total_steps decay, or decay_tokens");
  return {decay, options};
}
LearningRateSchedule warmup_cosine_restarts(const LearningRateScheduleOptions& options) {
  return {Decay::cosine_restarts, options};
}
LearningRateSchedule one_cycle(const LearningRateScheduleOptions& options, Decay anneal) {
  require(anneal == Decay::cosine || anneal == Decay::linear,
          "one_cycle goes up and down by Decay::cosine or Decay::linear; give one of these as its anneal");
  return {anneal == Decay::cosine ? Decay::one_cycle : Decay::one_cycle_linear, options};
}
LearningRateSchedule custom_schedule(LearningRateSchedule::Function factor) {
  return {std::move(factor), Decay::custom};
}
LearningRateSchedule custom_schedule_by_tokens(LearningRateSchedule::Function factor) {
  return {std::move(factor), Decay::custom_by_tokens};
}

}  // namespace pacer
