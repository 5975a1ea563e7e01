// OneBitLamb over random lists of parameters, options, numbers of ranks and incidents against the textbook,
// to the bit.
#include "support/catch.h"

#include "support/optimizers/onebit_lamb_ranks.h"

namespace pacer::testing::onebit_lamb_random {
namespace {

// What may differ from group to group.
void set_random_rule(Samples& samples, OneBitLambOptions& options) {
  options.lr(samples.log_uniform(1e-4, 1e-1)).eps(samples.log_uniform(1e-8, 1e-2));
  options.betas({samples.one_of({0.0, 0.5, 0.9, 0.99}), samples.one_of({0.5, 0.95, 0.999})});
  options.weight_decay(samples.one_of({0.0, 0.01, 0.1, 1.0})).bias_correction(samples.chance(0.5));
  options.max_coeff(samples.one_of({10.0, 1.0, 0.3})).min_coeff(samples.one_of({0.01, 0.0, 0.3}));
  options.coeff_beta(samples.one_of({0.9, 0.0, 0.5, 0.99})).adapt(samples.chance(0.8));
  options.factor_min(samples.one_of({0.5, 0.01, 1.0, 2.0})).factor_max(samples.one_of({4.0, 2.0, 1e6}));
  options.factor_threshold(samples.one_of({0.1, 0.0, 0.01, 0.9}));
}

std::vector<OneBitLambGroup> random_groups(Samples& samples) {
  std::vector<OneBitLambGroup> groups;
  OneBitLambOptions options;
  options.freeze_step(1 + samples.below(samples.chance(0.2) ? 20 : 6));
  options.variance_floor(samples.one_of({0.0, 0.01, 0.01, 1.0})).compress_alone(samples.chance(0.8));
  options.scale(samples.chance(0.3) ? ScaleNorm::l1 : ScaleNorm::rms);
  options.block_scales(samples.chance(0.3)).one_bit(samples.chance(0.85));
  for (int64_t g = 1 + samples.below(3); g > 0; --g) {
    set_random_rule(samples, options);
    options.compress(groups.empty() || samples.chance(0.7));
    std::vector<std::vector<int64_t>> shapes;
    for (int64_t i = 1 + samples.below(4); i > 0; --i) {
      shapes.push_back({samples.one_of({0, 1, 127, 128, 129, 2047, 2049}) + samples.below(3)});
      if (samples.chance(0.3)) shapes.back() = {1 + samples.below(60), 1 + samples.below(60)};
      if (samples.chance(0.05)) shapes.back() = {4097};
      if (samples.chance(0.01)) shapes.back() = {33000 + samples.below(40000)};
    }
    groups.push_back({shapes, options});
  }
  return groups;
}

// Spoils some of the gradients: missing, zero, or with a number that is not finite. `silent`: parameters that
// never have any but zero.
void spoil(Samples& samples, const std::vector<bool>& silent, OneBitLambRanks::Gradients& gradients) {
  for (auto& of_rank : gradients) {
    for (size_t i = 0; i < of_rank.size(); ++i) {
      Tensor& g = of_rank[i];
      if (samples.chance(0.05)) g = samples.chance(0.5) ? Tensor() : at::zeros_like(g);
      if (silent[i] && g.defined()) g.zero_();
    }
  }
  Tensor& spoilt =
      gradients[static_cast<size_t>(samples.below(static_cast<int64_t>(gradients.size())))].back();
  if (samples.chance(0.1) && spoilt.defined() && spoilt.numel() > 0) {
    spoilt.view({-1})[samples.below(spoilt.numel())] = samples.one_of({NAN, HUGE_VALF, -HUGE_VALF});
  }
}

// "" if `steps` attempts, some of them spoilt, some after a resume, are the textbook's.
std::string differ_over(uint64_t seed, int64_t steps) {
  Samples samples(seed);
  const int world_size = samples.one_of({1, 2, 3, 4, 7, 8});
  auto groups = random_groups(samples);
  const auto dtype = samples.one_of({at::kFloat, at::kFloat, at::kBFloat16, at::kHalf});
  const auto master_weights = samples.one_of({MasterWeights::automatic, MasterWeights::fp32});
  for (OneBitLambGroup& group : groups) group.options.master_weights(master_weights);
  OneBitLambRanks ranks(world_size, groups, dtype);
  OneBitLambTextbook textbook = textbook_of(ranks, groups);
  std::vector<bool> silent;
  for (size_t i = 0; i < textbook.parameters.size(); ++i) silent.push_back(samples.chance(0.15));
  for (int64_t t = 0; t < steps; ++t) {
    auto gradients = ranks.gradients(t + static_cast<int64_t>(seed) * 1000);
    spoil(samples, silent, gradients);
    if (samples.chance(0.1)) ranks.resume();
    const std::string message = ranks.step(gradients);
    textbook.step(textbook_gradients(gradients));
    const std::string what = message.empty() ? difference_from(textbook, ranks) : message;
    if (!what.empty()) return what + " after attempt " + std::to_string(t);
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      if (!same_bits(ranks.parameters[0], ranks.parameters[rank])) return "replica " + std::to_string(rank);
    }
  }
  return "";
}

}  // namespace

TEST_CASE("OneBitLamb is the textbook's to the bit over random runs", "[onebit_lamb]") {
  const uint64_t runs = wants_long_tests() ? 2000 : 30;
  for (uint64_t seed = 1; seed <= runs; ++seed) {
    CAPTURE(seed);
    REQUIRE(differ_over(seed, seed % 20 == 0 ? 200 : 20) == "");
  }
}

TEST_CASE("N3: frozen after one step, thousands more of 1-bit LAMB are the textbook's to the bit, and finite",
          "[onebit_lamb]") {
  const int64_t steps = wants_long_tests() ? 10'000 : 1'000;
  for (const bool constant : {false, true}) {
    for (const double weight_decay : {0.0, 0.01}) {
      if (constant && weight_decay > 0 && !wants_long_tests()) continue;
      const auto options = OneBitLambOptions(1e-3).freeze_step(1).weight_decay(weight_decay);
      const std::vector<OneBitLambGroup> groups = {
          {{{32, 8}, {33}, {1}}, options},
          {{{9}}, OneBitLambOptions(options).adapt(false).bias_correction(true)}};
      OneBitLambRanks ranks(2, groups);
      OneBitLambTextbook textbook = textbook_of(ranks, groups);
      const auto start = clones(ranks.parameters[0]);
      for (int64_t t = 0; t < steps; t += 250) {
        CAPTURE(constant, weight_decay, t);
        for (int64_t k = 0; k < 250; ++k) {
          auto gradients = ranks.gradients(t + k);
          for (auto& of_rank : gradients) {
            if (constant) of_rank[0].fill_(0.01);
            of_rank[0].narrow(0, 20, 12).zero_();  // rows that are never touched,
            of_rank[1].zero_();                    // and a tensor
          }
          REQUIRE(ranks.step(gradients) == "");
          textbook.step(textbook_gradients(gradients));
        }
        REQUIRE(difference_from(textbook, ranks) == "");
        for (const OneBitLambParameter& p : textbook.parameters) {
          for (const auto* numbers : {&p.value, &p.momentum, &p.variance, &p.fresh_variance}) {
            for (const float x : *numbers) REQUIRE(std::isfinite(x));
          }
          // Rounding may take an average of ratios over their bound.
          REQUIRE((p.coefficient() >= 0.01 * (1 - 1e-12) && p.coefficient() <= 10 * (1 + 1e-12)));
          REQUIRE((p.factor >= 0.5 && p.factor <= 4));
          REQUIRE((p.scale >= 1.0f / 1024 && p.scale <= 1024));
        }
        if (weight_decay > 0) continue;
        // What is never touched stays within learning rates of where it was.
        const Tensor moved = (ranks.parameters[1][0] - start[0]).narrow(0, 20, 12);
        REQUIRE(moved.abs().max().item<double>() <= 50 * 1e-3);
        REQUIRE(distance(ranks.parameters[1][1], start[1]) <= 50 * 1e-3);
      }
    }
  }
}

}  // namespace pacer::testing::onebit_lamb_random
