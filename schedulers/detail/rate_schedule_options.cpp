#include <pacer/schedulers/detail/rate_schedule_options.h>

#include <cmath>
#include <cstdint>
#include <optional>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// Checks the last part of a whole of steps or tokens, which begins behind the first `before` of it.
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

void require_one_cycle(const LearningRateScheduleOptions& o, const char* schedule) {
  require_unused(o.warm_up(), schedule, "warm_up");
  require_unused(o.total_tokens(), schedule, "total_tokens");
  require_unused(o.decay_steps(), schedule, "decay_steps");
  require_unused(o.decay_tokens(), schedule, "decay_tokens");
  require(o.warmup_steps() >= 1, schedule, " needs warm-up steps, which are its way up; give 1 or more");
  require(o.total_steps().has_value(), schedule,
          " needs total_steps, at the last of which its way down ends");
  require(*o.total_steps() > o.warmup_steps(), schedule, ": the warm-up takes ", o.warmup_steps(),
          " steps, but total_steps, which counts them, is ", *o.total_steps(),
          " and leaves none for the way down; give more total_steps or a shorter warm-up");
}

}  // namespace

const char* rate_schedule_name(Decay decay) {
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
    case Decay::one_cycle:
      return "one_cycle";
    case Decay::one_cycle_linear:
      return "a linear one_cycle";
    case Decay::custom:
      return "custom_schedule";
    case Decay::custom_by_tokens:
      return "custom_schedule_by_tokens";
  }
  throw InvalidArgument("a learning-rate schedule was given a decay that does not exist");
}

bool has_an_end(Decay decay) {
  return decay == Decay::linear || decay == Decay::cosine || decay == Decay::polynomial ||
         decay == Decay::minus_sqrt || decay == Decay::halving;
}

bool is_one_cycle(Decay decay) { return decay == Decay::one_cycle || decay == Decay::one_cycle_linear; }

void check_rate_schedule_options(Decay decay, const LearningRateScheduleOptions& options) {
  const char* name = rate_schedule_name(decay);
  const auto& o = options;
  require(decay != Decay::custom && decay != Decay::custom_by_tokens,
          "a decay that is a function of yours is made by custom_schedule or custom_schedule_by_tokens; give "
          "it to "
          "one of these");
  require(o.warmup_steps() >= 0, name, ": the number of warm-up steps must not be negative, but is ",
          o.warmup_steps());
  const WarmUp warm_up = o.warm_up().value_or(WarmUp::linear);
  require(warm_up == WarmUp::linear || warm_up == WarmUp::logarithmic, name,
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
  } else if (is_one_cycle(decay)) {
    require_one_cycle(o, name);
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

}  // namespace pacer::detail
