// Layer gates, sequence lengths and learning-rate schedules over a million random cases each: statistics,
// bounds, monotony, and that nothing depends on what was asked before. All are a function of the seeds below.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include <pacer/schedulers/layer_drop_rule.h>
#include <pacer/schedulers/learning_rate_schedule.h>
#include <pacer/schedulers/length_schedule.h>

#include "support/catch.h"
#include "support/samples.h"
#include "support/schedulers/gate_progress.h"

namespace pacer::testing {
namespace {

constexpr int kCases = 1'000'000;

// In [1, 2^bits), evenly spread over the logarithm, and the ends themselves now and then.
int64_t count_up_to_bits(Samples& samples, int bits) {
  if (samples.chance(0.02)) return 1;
  if (samples.chance(0.02)) return int64_t{1} << bits;
  return 1 + static_cast<int64_t>(samples.bits() >> (64 - bits + samples.below(bits)));
}

// A place on the way to `end`: before it, around it, or far beyond.
int64_t position_around(Samples& samples, int64_t end) {
  switch (samples.below(6)) {
    case 0:
      return samples.below(3);
    case 1:
      return end - samples.below(std::min<int64_t>(end, 3) + 1);
    case 2:
      return end + samples.below(3);
    case 3:
      return count_up_to_bits(samples, 62);
    default:
      return static_cast<int64_t>(samples.uniform() * static_cast<double>(end));
  }
}

Progress anywhere_with(Samples& samples, bool tokens, int64_t position) {
  Progress progress;
  progress.step = tokens ? samples.below(1'000) : position;
  progress.tokens = tokens ? position : samples.below(1'000);
  return progress;
}

struct RandomRamp {
  int64_t end, first, last, difficulty_step;
  bool tokens;
  LengthSchedule schedule;
};

RandomRamp random_ramp(Samples& samples) {
  const int64_t end = samples.chance(0.02) ? 0 : count_up_to_bits(samples, 62);
  const int bits = samples.chance(0.1) ? 62 : 13;
  const auto [first, last] = std::minmax({count_up_to_bits(samples, bits), count_up_to_bits(samples, bits)});
  const int64_t step = samples.chance(0.5) ? 8 : count_up_to_bits(samples, samples.chance(0.1) ? 62 : 8);
  RandomRamp ramp{end, first, last, step, samples.chance(0.5), LengthSchedule(first, last)};
  ramp.tokens ? ramp.schedule.ramp_tokens(end) : ramp.schedule.ramp_steps(end);
  if (step != 8) ramp.schedule.difficulty_step(step);
  if (samples.chance(0.6)) ramp.schedule.root(samples.log_uniform(0.1, 10));
  return ramp;
}

struct RandomRate {
  LearningRateSchedule schedule;
  double least;  // no factor is below it
  int64_t warmup, total;
  bool restarts;
};

RandomRate random_rate(Samples& samples) {
  int64_t warmup = samples.chance(0.1) ? 0 : count_up_to_bits(samples, 62);
  int64_t total = count_up_to_bits(samples, 62);
  const double start = samples.chance(0.3) ? 0 : samples.uniform(),
               end = samples.chance(0.3) ? 0 : samples.uniform();
  LearningRateScheduleOptions options;
  options.start_factor(start).warm_up(samples.chance(0.5) ? WarmUp::linear : WarmUp::logarithmic);
  constexpr Decay kDecays[] = {Decay::constant,   Decay::linear,          Decay::cosine,
                               Decay::polynomial, Decay::exponential,     Decay::inverse_sqrt,
                               Decay::minus_sqrt, Decay::halving,         Decay::cosine_restarts,
                               Decay::one_cycle,  Decay::one_cycle_linear};
  const Decay decay = samples.one_of(kDecays);
  double least = 0;
  if (decay == Decay::linear || decay == Decay::cosine || decay == Decay::polynomial ||
      decay == Decay::minus_sqrt || decay == Decay::halving) {
    const bool tokens = samples.chance(0.3);
    if (!tokens) total = std::max(total, warmup);  // a total of steps includes the warm-up
    tokens ? options.total_tokens(total) : options.total_steps(total);
    options.end_factor(end);
    least = tokens ? start * end : std::min(start, end);
    const int64_t most = tokens ? total : total - warmup;
    const auto part = static_cast<int64_t>(samples.uniform() * static_cast<double>(most));
    if (samples.chance(0.3)) tokens ? options.decay_tokens(part) : options.decay_steps(part);
  }
  if (decay == Decay::cosine_restarts) {
    options.end_factor(end).cycle_steps(count_up_to_bits(samples, 62));
    options.cycle_growth(count_up_to_bits(samples, samples.chance(0.1) ? 62 : 4));
    least = std::min(start, end);
  }
  if (decay == Decay::one_cycle || decay == Decay::one_cycle_linear) {
    warmup = std::max<int64_t>(warmup, 1);
    total = std::max(total, warmup + 1);
    options.warm_up(std::nullopt).total_steps(total).end_factor(end);
    least = std::min(start, end);
  }
  options.warmup_steps(warmup);
  if (decay == Decay::constant) least = start;
  if (decay == Decay::polynomial) options.power(samples.log_uniform(0.1, 10));
  if (decay == Decay::exponential) {
    options.gamma(samples.log_uniform(1e-9, 1)).every(count_up_to_bits(samples, 62));
  }
  return {LearningRateSchedule(decay, options), least, warmup, total, decay == Decay::cosine_restarts};
}

}  // namespace

TEST_CASE("layers are kept as often as their probability says", "[schedulers][layer_drop][property]") {
  // A bucket is a layer at a stage of training: 12 x 10 buckets of about 8,300 (seed, step) each, in which
  // the probability is nearly one; its sum over the draws is the expectation.
  constexpr int64_t kLayers = 12, kStages = 10, kStageSteps = 400;
  struct Bucket {
    double kept = 0, expected = 0, variance = 0;
  };
  std::vector<Bucket> buckets(kLayers * kStages);
  Samples samples(11);
  for (int i = 0; i < kCases; ++i) {
    const LayerDropOptions options = LayerDropOptions().seed(samples.bits());
    const int64_t layer = samples.below(kLayers), step = samples.below(kStages * kStageSteps);
    const double p = keep_probability(options, layer, kLayers, gate_progress(step));
    Bucket& bucket = buckets[static_cast<size_t>(step / kStageSteps * kLayers + layer)];
    bucket.kept += keeps_layer(options, layer, kLayers, gate_progress(step, samples.below(1 << 24)));
    bucket.expected += p;
    bucket.variance += p * (1 - p);
  }
  double squares = 0;
  for (const Bucket& bucket : buckets) {
    const double deviation = (bucket.kept - bucket.expected) / std::sqrt(bucket.variance);
    REQUIRE(std::abs(deviation) < 4);
    squares += deviation * deviation;
  }
  // Nor do the buckets together: the sum of squares has mean 120 and standard deviation sqrt(240).
  CHECK(std::abs(squares - 120) < 4 * std::sqrt(240));
}

TEST_CASE("consecutive steps, layers and micro-steps of one seed drop independently",
          "[schedulers][layer_drop][property]") {
  // With gamma huge and one layer of probability 1/2, kept is a fair coin; neighbours must agree half the
  // time.
  const LayerDropOptions options = LayerDropOptions().theta_bar(0.5).gamma(1e3).seed(12);
  const auto coin = [&](int64_t layer, int64_t step, int64_t micro_step) {
    return layer_drop_draw(options.seed(), layer, step, micro_step) < keep_threshold(0.5);
  };
  constexpr int kCoins = 100'000;
  int heads = 0, by_step = 0, by_layer = 0, by_micro_step = 0;
  for (int64_t i = 0; i < kCoins; ++i) {
    const bool here = coin(i % 10, i / 10, 0);
    heads += here;
    by_step += here == coin(i % 10, i / 10 + 1, 0);
    by_layer += here == coin(i % 10 + 1, i / 10, 0);
    by_micro_step += here == coin(i % 10, i / 10, 1);
  }
  for (const int count : {heads, by_step, by_layer, by_micro_step}) {
    CHECK(std::abs(count - kCoins / 2) < 4 * std::sqrt(kCoins / 4.0));
  }
}

TEST_CASE("a gate does not depend on the order in which gates are asked",
          "[schedulers][layer_drop][property]") {
  constexpr int64_t kLayers = 8, kSteps = 2'000, kMicroSteps = 3;
  const LayerDropOptions options = LayerDropOptions().gamma(0.01).seed(13);
  const auto gate = [&](int64_t i) {
    return keeps_layer(options, i % kLayers, kLayers,
                       gate_progress(i / kLayers / kMicroSteps, i / kLayers % kMicroSteps));
  };
  std::vector<int64_t> order(kLayers * kSteps * kMicroSteps);
  std::iota(order.begin(), order.end(), 0);
  std::vector<bool> in_order;
  for (const int64_t i : order) in_order.push_back(gate(i));
  Samples samples(14);
  for (size_t i = order.size() - 1; i > 0; --i) {
    std::swap(order[i], order[static_cast<size_t>(samples.below(static_cast<int64_t>(i) + 1))]);
  }
  for (const int64_t i : order) REQUIRE(gate(i) == in_order[static_cast<size_t>(i)]);
}

TEST_CASE("theta falls from 1 and never below theta_bar, probabilities with it and with depth",
          "[schedulers][layer_drop][property]") {
  Samples samples(15);
  for (int i = 0; i < kCases; ++i) {
    const LayerDropOptions options =
        LayerDropOptions().theta_bar(1 - samples.uniform()).gamma(samples.log_uniform(1e-9, 10));
    const int64_t step = count_up_to_bits(samples, 40), layers = 2 + samples.below(100);
    const int64_t layer = samples.below(layers - 1);
    const Progress now = gate_progress(step), before = gate_progress(step - 1);
    const double theta = layer_drop_theta(options, now), earlier = layer_drop_theta(options, before);
    const double p = keep_probability(options, layer, layers, now);
    const bool right = theta >= options.theta_bar() && theta <= earlier && earlier <= 1 && p >= 0 && p <= 1 &&
                       p <= keep_probability(options, layer, layers, before) &&
                       p >= keep_probability(options, layer + 1, layers, now) &&
                       keep_probability(options, layers - 1, layers, now) >= theta - 1e-15;
    if (!right) FAIL("case " << i << ": theta " << theta << ", p " << p << " at step " << step);
  }
}

TEST_CASE("shares of depth rise from the first layer to 1, and probabilities are those of theta and share",
          "[schedulers][layer_drop][property]") {
  Samples samples(19);
  for (int i = 0; i < kCases; ++i) {
    const auto depth = static_cast<DropDepth>(samples.below(4));
    LayerDropOptions options = LayerDropOptions().theta_bar(1 - samples.uniform());
    const int64_t layers = 1 + samples.below(100), layer = samples.below(layers);
    const int64_t last = 1 + samples.below(layers), total = 1 + samples.below(1'000);
    const bool by_depth = samples.chance(0.7);
    if (by_depth) {
      options.depth(depth);
    } else {
      options.last_layers(last);
    }
    options.schedule(warmup_linear({samples.below(total + 1), total}));
    const Progress now = gate_progress(samples.below(1'200));
    const double share = depth_share(options, layer, layers), theta = layer_drop_theta(options, now);
    const double p = keep_probability(options, layer, layers, now);
    const double deepest = depth_share(options, layers - 1, layers);
    const bool ends_at_one =
        layers > 1 || !by_depth || depth == DropDepth::linear || depth == DropDepth::uniform;
    const bool right = share >= 0 && share <= 1 && (!ends_at_one || deepest == 1) &&
                       (layer == 0 || share >= depth_share(options, layer - 1, layers)) &&
                       theta >= options.theta_bar() - 1e-15 && theta <= 1 && p >= 0 && p <= 1 &&
                       std::abs((1 - p) - share * (1 - theta)) < 1e-15;
    if (!right) FAIL("case " << i << ": share " << share << ", theta " << theta << ", p " << p);
  }
}

TEST_CASE("a sequence length is in range, a multiple of its step, and never falls",
          "[schedulers][length][property]") {
  Samples samples(16);
  for (int i = 0; i < kCases; ++i) {
    const RandomRamp ramp = random_ramp(samples);
    int64_t early = position_around(samples, ramp.end), late = position_around(samples, ramp.end);
    if (samples.chance(0.3)) late = early + 1;
    if (early > late) std::swap(early, late);
    const auto at = [&](int64_t position) {
      return ramp.schedule.length(anywhere_with(samples, ramp.tokens, position));
    };
    const int64_t length = at(early), later_length = at(late);
    const bool settled = ramp.schedule.settled(anywhere_with(samples, ramp.tokens, early));
    const char* wrong = nullptr;
    if (length < ramp.first || length > ramp.last) wrong = "out of range";
    if (length % ramp.difficulty_step != 0 && length != ramp.first && length != ramp.last)
      wrong = "no multiple";
    if (later_length < length) wrong = "falls";
    if (at(early) != length) wrong = "depends on what was asked before";
    if (settled != (early >= ramp.end)) wrong = "settled at the wrong time";
    if (settled && length != ramp.last) wrong = "settled, but not at the last length";
    if (wrong != nullptr) {
      FAIL("case " << i << ": " << wrong << ": " << ramp.first << " to " << ramp.last << " over " << ramp.end
                   << " by " << ramp.difficulty_step << ": " << length << " at " << early << ", "
                   << later_length << " at " << late);
    }
  }
}

TEST_CASE("a sequence length is the rounded value of the exact ramp", "[schedulers][length][property]") {
  // Linear ramps with small numbers, in integers: floor(first + (last - first) q / end).
  Samples samples(17);
  for (int i = 0; i < kCases / 4; ++i) {
    const int64_t first = 1 + samples.below(2'000), last = first + samples.below(4'000);
    const int64_t end = 1 + samples.below(samples.chance(0.5) ? 64 : 100'000);
    const int64_t step = 1 + samples.below(64), q = samples.below(end);
    const int64_t exact = (first * end + (last - first) * q) / end;
    Progress progress;
    progress.step = q;
    const int64_t length = LengthSchedule(first, last).ramp_steps(end).difficulty_step(step).length(progress);
    if (length != std::clamp(exact / step * step, first, last)) {
      FAIL("case " << i << ": " << first << " to " << last << " over " << end << " by " << step << ": "
                   << length << " at " << q);
    }
  }
}

TEST_CASE("a learning-rate factor is finite, in range, and independent of what was asked before",
          "[schedulers][rate][property]") {
  Samples samples(18);
  for (int i = 0; i < kCases; ++i) {
    const RandomRate rate = random_rate(samples);
    Progress progress;
    progress.step = position_around(samples, samples.chance(0.5) ? rate.warmup : rate.total);
    progress.tokens = position_around(samples, rate.total);
    const double factor = rate.schedule.factor(progress);
    Progress elsewhere = progress;
    elsewhere.step = position_around(samples, rate.total);
    const double other = rate.schedule.factor(elsewhere);
    // Up to the end of the warm-up the rate never falls, after it never rises but at a restart.
    const bool warm = rate.schedule.warmup_ended(progress),
               other_warm = rate.schedule.warmup_ended(elsewhere);
    const double earlier_one = elsewhere.step >= progress.step ? factor : other;
    const double later_one = elsewhere.step >= progress.step ? other : factor;
    const char* wrong = nullptr;
    if (!std::isfinite(factor)) wrong = "not finite";
    if (factor < rate.least - 1e-15 || factor > 1) wrong = "out of range";
    if (rate.schedule.factor(progress) != factor) wrong = "depends on what was asked before";
    if (warm && other_warm && later_one > earlier_one && !rate.restarts) wrong = "rises after the warm-up";
    if (!warm && !other_warm && later_one < earlier_one) wrong = "falls during the warm-up";
    if (wrong != nullptr) {
      FAIL("case " << i << ": " << wrong << ": " << factor << " at step " << progress.step << ", " << other
                   << " at step " << elsewhere.step << ", token " << progress.tokens << ", warm-up "
                   << rate.warmup << ", total " << rate.total);
    }
  }
}

TEST_CASE("a chain is the part that has begun last, and warms up as long as a part does",
          "[schedulers][rate][property]") {
  struct Part {
    bool by_tokens;
    int64_t begin, warmup;
    LearningRateSchedule schedule;
  };
  Samples samples(19);
  const auto random_part = [&](bool by_tokens, int64_t begin) {
    const int64_t warmup = by_tokens || samples.chance(0.4) ? 0 : 1 + samples.below(30);
    LearningRateScheduleOptions options(warmup);
    if (samples.chance(0.5)) return Part{by_tokens, begin, warmup, constant_schedule(options)};
    if (by_tokens)
      return Part{by_tokens, begin, warmup, warmup_cosine(options.total_tokens(1 + samples.below(50)))};
    options.total_steps(warmup + 1 + samples.below(50));
    return Part{by_tokens, begin, warmup, warmup == 0 ? warmup_linear(options) : one_cycle(options)};
  };
  for (int i = 0; i < kCases / 20; ++i) {
    std::vector<Part> parts = {random_part(false, 0)};
    LearningRateSchedule chain = parts[0].schedule;
    int64_t last[] = {0, 0};  // where the latest part by steps begins, and by tokens
    bool any_by_tokens = false;
    for (int64_t more = samples.below(4); more > 0; --more) {
      const bool by_tokens = samples.chance(0.2);
      const int64_t begin = last[by_tokens] += 1 + samples.below(40);
      any_by_tokens = any_by_tokens || by_tokens;
      parts.push_back(random_part(by_tokens, begin));
      chain = by_tokens ? chain.then_at_token(begin, parts.back().schedule)
                        : chain.then(begin, parts.back().schedule);
    }
    const auto part_at = [&](const Progress& progress) {
      const Part* found = &parts[0];
      for (const Part& part : parts) {
        if ((part.by_tokens ? progress.tokens : progress.step) >= part.begin) found = &part;
      }
      return found;
    };
    Progress progress;
    progress.step = samples.below(180);
    progress.tokens = samples.below(180);
    const Part& part = *part_at(progress);
    Progress since = progress;
    (part.by_tokens ? since.tokens : since.step) -= part.begin;
    bool warms_up = false;
    for (Progress later = progress; later.step < 200; ++later.step) {
      const Part& then = *part_at(later);
      warms_up = warms_up || (then.warmup > 0 && later.step < then.begin + then.warmup);
    }
    const bool ended = chain.warmup_ended(progress);
    const auto zero_from = chain.steps_until_zero();
    const char* wrong = nullptr;
    if (chain.factor(progress) != part.schedule.factor(since)) wrong = "not the part that has begun last";
    if (ended && warms_up) wrong = "has not warmed up";
    if (!ended && !warms_up && !any_by_tokens) wrong = "has warmed up";
    if (chain.by_tokens() != any_by_tokens) wrong = "by tokens or not";
    if (zero_from && progress.step >= *zero_from && chain.factor(progress) != 0)
      wrong = "not zero at the end";
    if (wrong != nullptr) {
      FAIL("case " << i << ": " << wrong << ": step " << progress.step << ", token " << progress.tokens
                   << ", " << chain.describe());
    }
  }
}

}  // namespace pacer::testing
