#include <pacer/schedulers/learning_rate_schedule.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>

namespace pacer {
namespace {

constexpr double kPi = 3.141592653589793238462643383279502884;

const char* name_of(Decay decay) {
  switch (decay) {
    case Decay::constant:
      return "constant_schedule";
    case Decay::linear:
      return "warmup_linear";
    case Decay::cosine:
      return "warmup_cosine";
    case Decay::polynomial:
      return "warmup_polynomial";
    case Decay::exponential:
      return "warmup_exponential";
    case Decay::inverse_sqrt:
      return "warmup_inverse_sqrt";
    case Decay::minus_sqrt:
      return "a decay by minus_sqrt";
    case Decay::halving:
      return "a decay by halving";
    case Decay::cosine_restarts:
      return "warmup_cosine_restarts";
  }
  throw InvalidArgument("a learning-rate schedule was given a decay that does not exist");
}

bool has_an_end(Decay decay) {
  return decay == Decay::linear || decay == Decay::cosine || decay == Decay::polynomial ||
         decay == Decay::minus_sqrt || decay == Decay::halving;
}

// Of a whole of steps or tokens, the part behind the first `before` of it.
void require_part(const std::optional<int64_t>& part, const std::optional<int64_t>& whole, int64_t before,
                  const char* schedule, const char* part_name, const char* whole_name) {
  if (!part) return;
  require(whole.has_value(), schedule, ": ", part_name, " are the last ones of ", whole_name,
          ", which is not given");
  require(*part >= 0 && *part <= *whole - before, schedule, ": ", part_name, " must be from 0 to ",
          *whole - before, ", not ", *part);
}

template <class Value>
void require_unused(const std::optional<Value>& value, const char* schedule, const char* option) {
  require(!value.has_value(), schedule, " has no use for ", option,
          "; leave it out or take another schedule");
}

template <class Value>
void require_count(const std::optional<Value>& value, int64_t least, const char* schedule,
                   const char* option) {
  require(!value || *value >= least, schedule, ": ", option, " must be at least ", least, ", not ",
          value.value_or(0));
}

void require_share(const std::optional<double>& value, const char* schedule, const char* option) {
  require(!value || (*value >= 0 && *value <= 1), schedule, ": ", option,
          " is a share of the base rate and must be in [0, 1], not ", value.value_or(0));
}

}  // namespace

LearningRateSchedule::LearningRateSchedule(Decay decay, const LearningRateScheduleOptions& options)
    : decay_(decay), options_(options) {
  const char* name = name_of(decay);
  const auto& o = options_;
  require(o.warmup_steps() >= 0, name, ": the number of warm-up steps must not be negative, but is ",
          o.warmup_steps());
  require(o.warm_up() == WarmUp::linear || o.warm_up() == WarmUp::logarithmic, name,
          ": warm_up must be WarmUp::linear or WarmUp::logarithmic");
  require_share(o.start_factor(), name, "start_factor");
  require_share(o.end_factor(), name, "end_factor");
  require_count(o.total_steps(), 0, name, "total_steps");
  require_count(o.total_tokens(), 0, name, "total_tokens");
  require_count(o.every(), 1, name, "every");
  require(!o.power() || (*o.power() > 0 && std::isfinite(*o.power())), name,
          ": power must be positive and finite, not ", o.power().value_or(0));
  require(!o.gamma() || (*o.gamma() > 0 && *o.gamma() <= 1), name, ": gamma must be in (0, 1], not ",
          o.gamma().value_or(0));

  if (has_an_end(decay)) {
    require(!(o.total_steps() && o.total_tokens()), name,
            " was given total_steps and total_tokens; give the one that the decay shall follow");
    require(o.total_steps() || o.total_tokens(), name,
            " needs to know where the decay ends; give total_steps or total_tokens");
    require(!o.total_steps() || *o.total_steps() >= o.warmup_steps(), name, ": the warm-up takes ",
            o.warmup_steps(), " steps, but total_steps, which counts them, is ", o.total_steps().value_or(0),
            "; give more total_steps or a shorter warm-up");
    require_part(o.decay_steps(), o.total_steps(), o.warmup_steps(), name, "decay_steps", "total_steps");
    require_part(o.decay_tokens(), o.total_tokens(), 0, name, "decay_tokens", "total_tokens");
  } else {
    require_unused(o.total_steps(), name, "total_steps");
    require_unused(o.total_tokens(), name, "total_tokens");
    require_unused(o.decay_steps(), name, "decay_steps");
    require_unused(o.decay_tokens(), name, "decay_tokens");
    if (decay != Decay::cosine_restarts) require_unused(o.end_factor(), name, "end_factor");
  }
  require_count(o.cycle_steps(), 1, name, "cycle_steps");
  require_count(o.cycle_growth(), 1, name, "cycle_growth");
  if (decay != Decay::cosine_restarts) {
    require_unused(o.cycle_steps(), name, "cycle_steps");
    require_unused(o.cycle_growth(), name, "cycle_growth");
  } else {
    require(o.cycle_steps().has_value(), name, " needs cycle_steps, the length of the first cycle");
  }
  if (decay != Decay::polynomial) require_unused(o.power(), name, "power");
  if (decay != Decay::exponential) {
    require_unused(o.gamma(), name, "gamma");
    require_unused(o.every(), name, "every");
  } else {
    require(o.gamma().has_value(), name, " needs gamma, the factor of one decay");
  }
}

std::string LearningRateSchedule::describe() const {
  const auto& o = options_;
  std::string text =
      detail::concatenate(name_of(decay_), ", ", o.warm_up() == WarmUp::linear ? "linear" : "logarithmic",
                          " warm-up of ", o.warmup_steps(), " steps from ", exact_text(o.start_factor()));
  const auto add = [&](const char* name, const auto& value) {
    if (value) text += detail::concatenate(", ", name, ' ', exact_text(double(*value)));
  };
  add("total_steps", o.total_steps());
  add("total_tokens", o.total_tokens());
  add("decay_steps", o.decay_steps());
  add("decay_tokens", o.decay_tokens());
  add("end_factor", o.end_factor());
  add("power", o.power());
  add("gamma", o.gamma());
  add("every", o.every());
  add("cycle_steps", o.cycle_steps());
  add("cycle_growth", o.cycle_growth());
  return text;
}

std::optional<int64_t> LearningRateSchedule::steps_until_zero() const {
  const bool ends_at_zero = has_an_end(decay_) && options_.end_factor().value_or(0) == 0;
  return ends_at_zero ? options_.total_steps() : std::nullopt;
}

double LearningRateSchedule::factor(const Progress& progress) const {
  require(progress.step >= 0 && progress.tokens >= 0, "a learning-rate schedule was asked for step ",
          progress.step, " and token ", progress.tokens, "; both count from 0");
  if (!warmup_ended(progress)) {
    const double warmup = warmup_factor(progress.step);
    return by_tokens() ? warmup * decay_factor(progress) : warmup;
  }
  return decay_factor(progress);
}

// `step` is below warmup_steps, which is therefore positive.
double LearningRateSchedule::warmup_factor(int64_t step) const {
  const double start = options_.start_factor();
  const double k = static_cast<double>(step) + 1, w = static_cast<double>(options_.warmup_steps());
  const double share = options_.warm_up() == WarmUp::linear ? k / w : std::log1p(k) / std::log1p(w);
  return start + (1 - start) * std::min(share, 1.0);
}

double LearningRateSchedule::decay_factor(const Progress& progress) const {
  const auto from_one_to_end = [this](double left) {  // left: 1 before the decay, 0 after it
    const double end = options_.end_factor().value_or(0);
    return end + (1 - end) * left;
  };
  const int64_t warmup_steps = options_.warmup_steps();
  switch (decay_) {
    case Decay::constant:
      return 1;
    case Decay::linear:
      return from_one_to_end(1 - decayed_share(progress));
    case Decay::cosine:
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
    case Decay::inverse_sqrt: {
      const double k = static_cast<double>(progress.step) + 1;
      const double least = std::max(static_cast<double>(warmup_steps), 1.0);
      return std::sqrt(least / std::max(k, least));
    }
  }
  return 1;  // not reached: the constructor refuses other values
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
  if (by_tokens())
    return share(progress.tokens, *o.total_tokens(), o.decay_tokens().value_or(*o.total_tokens()));
  const int64_t behind_warmup = *o.total_steps() - o.warmup_steps();
  return share(progress.step, *o.total_steps(), o.decay_steps().value_or(behind_warmup));
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
  require(has_an_end(decay),
          "warmup_stable_decay decays by linear, cosine, polynomial, minus_sqrt or halving");
  require(options.decay_steps() || options.decay_tokens(),
          "warmup_stable_decay needs decay_steps, how many of total_steps decay, or decay_tokens");
  return {decay, options};
}
LearningRateSchedule warmup_cosine_restarts(const LearningRateScheduleOptions& options) {
  return {Decay::cosine_restarts, options};
}

}  // namespace pacer
