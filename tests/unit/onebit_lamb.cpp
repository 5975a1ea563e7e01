// OneBitLamb's steps against the textbook, to the bit: warm-up, compressed steps on any number of ranks, full
// precision behind the freeze, and groups that are not compressed.
#include "support/catch.h"

#include "support/lamb.h"
#include "support/onebit_lamb_ranks.h"

namespace pacer::testing::onebit_lamb_steps {
namespace {

// Odd sizes, one element, none, and more than a row; the second group with settings of its own.
std::vector<OneBitLambGroup> two_groups(const OneBitLambOptions& options) {
  const auto other = OneBitLambOptions(options).lr(3e-3).betas({0.8, 0.95}).eps(1e-4).weight_decay(0);
  return {{{{37, 13}, {0, 3}, {1}}, options},
          {{{129}, {4097}}, OneBitLambOptions(other).max_coeff(0.3).coeff_beta(0.7)}};
}

FusedLambOptions lamb_like(const OneBitLambOptions& o) {
  return FusedLambOptions(o.lr())
      .betas(o.betas())
      .eps(o.eps())
      .weight_decay(o.weight_decay())
      .bias_correction(o.bias_correction())
      .min_coeff(o.min_coeff())
      .max_coeff(o.max_coeff())
      .adapt(o.adapt());
}

// FusedLamb takes a step with the mean of all ranks' gradients, added in rank order.
void step_with_mean(FusedLamb& peer, const std::vector<Tensor>& parameters,
                    const OneBitLambRanks::Gradients& gradients, size_t first = 0) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    Tensor sum = gradients[0][first + i].clone();
    for (size_t rank = 1; rank < gradients.size(); ++rank) sum = sum + gradients[rank][first + i];
    parameters[i].mutable_grad() = sum;
  }
  StepInputs inputs;
  inputs.average = 1.0 / static_cast<double>(gradients.size());
  peer.prepare(inputs);
  peer.conclude(peer.enqueue());
}

}  // namespace

TEST_CASE("freeze_step(T) means T steps that are FusedLamb's to the bit", "[onebit_lamb]") {
  for (const int world_size : {1, 3}) {
    for (const bool bias_correction : {true, false}) {
      CAPTURE(world_size, bias_correction);
      const auto options = OneBitLambOptions(0.01).weight_decay(0.1).bias_correction(bias_correction);
      auto groups = two_groups(OneBitLambOptions(options).freeze_step(5).compress_alone(true));
      groups.push_back({{{20}}, OneBitLambOptions(groups[0].options).adapt(false)});
      OneBitLambRanks ranks(world_size, groups);
      auto twins = clones(ranks.parameters[0]);
      std::vector<torch::optim::OptimizerParamGroup> peers;
      size_t next = 0;
      for (const OneBitLambGroup& group : groups) {
        std::vector<Tensor> part;
        for (size_t i = 0; i < group.shapes.size(); ++i) part.push_back(twins[next++]);
        peers.emplace_back(part, std::make_unique<FusedLambOptions>(lamb_like(group.options)));
      }
      FusedLamb peer(peers, lamb_like(options));
      // The averages of trust ratios beside it.
      std::vector<double> average(twins.size(), 0.0), weight(twins.size(), 0.0);
      for (int64_t t = 1; t <= 6; ++t) {
        for (size_t i = 0; i < twins.size(); ++i) {
          if (t == 1) CHECK(ranks.optimizers[0]->coefficient(ranks.parameters[0][i]) == 1);
        }
        const auto gradients = ranks.gradients(t);
        REQUIRE(ranks.step(gradients) == "");
        step_with_mean(peer, twins, gradients);
        for (size_t i = 0; i < twins.size() && t <= 5; ++i) {
          if (twins[i].numel() == 0 || i == 5) continue;  // no norms, no adaptation
          const double cb = i >= 3 ? 0.7 : 0.9;
          average[i] = cb * average[i] + (1 - cb) * peer.trust_ratio(twins[i]);
          weight[i] = cb * weight[i] + (1 - cb);
        }
        for (int rank = 0; rank < world_size; ++rank) {
          const auto r = static_cast<size_t>(rank);
          const OneBitLamb& optimizer = *ranks.optimizers[r];
          CAPTURE(t, rank);
          REQUIRE(same_bits(ranks.parameters[r], twins) == (t <= 5));
          REQUIRE((optimizer.phase() == OneBitPhase::compressed) == (t >= 5));
          REQUIRE(optimizer.frozen_at() == (t >= 5 ? std::optional<int64_t>(5) : std::nullopt));
          REQUIRE(optimizer.attempts() == t);
          REQUIRE((optimizer.gradient_scope() == GradientScope::rank) == (t >= 5));
          for (size_t i = 0; i < twins.size(); ++i) {
            CAPTURE(i);
            const double expected = weight[i] > 0 ? average[i] / weight[i] : 1;
            REQUIRE(optimizer.coefficient(ranks.parameters[r][i]) == Catch::Approx(expected).epsilon(1e-14));
            if (t <= 5) REQUIRE(optimizer.factor(ranks.parameters[r][i]) == 1);
            if (t < 5) REQUIRE(optimizer.momentum_scale(ranks.parameters[r][i]) == 1);
          }
          if (t >= 5) continue;
          for (const Tensor& twin : twins) {
            const std::string name = peer.parameter_name(twin);
            const auto own = optimizer.export_state(), others = peer.export_state();
            REQUIRE(same_bits(own.at(name + "/exp_avg"), others.at(name + "/exp_avg")));
            REQUIRE(same_bits(own.at(name + "/exp_avg_sq"), others.at(name + "/exp_avg_sq")));
          }
        }
      }
    }
  }
}

TEST_CASE("1-bit LAMB's compressed steps are the textbook's to the bit on every number of ranks",
          "[onebit_lamb]") {
  const auto plain = OneBitLambOptions(0.01).freeze_step(4).compress_alone(true).weight_decay(0.1);
  for (const int world_size : {1, 2, 3, 4, 7, 8}) {
    for (const int kind : {0, 1, 2, 3, 4}) {
      CAPTURE(world_size, kind);
      OneBitLambOptions options = plain;
      if (kind == 1) options.bias_correction(true).weight_decay(0);
      if (kind == 2) options.scale(kernels::ScaleNorm::l1).variance_floor(0).max_coeff(1.0);
      if (kind == 3) options.block_scales(true).factor_threshold(0.5).factor_min(0.01).factor_max(100);
      if (kind == 4) options.adapt(false).bias_correction(true);
      auto groups = two_groups(options);
      if (kind == 4) groups[1].options.adapt(true);
      OneBitLambRanks ranks(world_size, groups);
      OneBitLambTextbook textbook = textbook_of(ranks, groups);
      REQUIRE(differ_after(ranks, textbook, 16) == "");
      REQUIRE(textbook.frozen_at == 4);
      for (size_t rank = 1; rank < ranks.size(); ++rank) {
        REQUIRE(same_bits(ranks.parameters[0], ranks.parameters[rank]));
      }
    }
  }
}

TEST_CASE("200 steps of 1-bit LAMB with skipped steps and resumes are the textbook's to the bit",
          "[onebit_lamb]") {
  for (const int world_size : {1, 4}) {
    CAPTURE(world_size);
    const auto options = OneBitLambOptions(0.01).freeze_step(20).compress_alone(true);
    const std::vector<OneBitLambGroup> groups = {{{{31}, {0}, {5, 67}}, options},
                                                 {{{1}, {260}}, OneBitLambOptions(options).weight_decay(0)}};
    OneBitLambRanks ranks(world_size, groups);
    OneBitLambTextbook textbook = textbook_of(ranks, groups);
    // In warm-up, at the freeze itself, and twice in compressed steps.
    const GradientEdit spoil = [&](int64_t attempt, OneBitLambRanks::Gradients& gradients) {
      if (attempt != 5 && attempt != 19 && attempt != 50 && attempt != 89) return;
      gradients.back()[2].view({-1})[11] = NAN;
    };
    REQUIRE(differ_after(ranks, textbook, 13, spoil) == "");
    ranks.resume();  // in warm-up
    REQUIRE(differ_after(ranks, textbook, 7, spoil) == "");
    REQUIRE(textbook.frozen_at == 20);
    ranks.resume();  // frozen, its momentum whole
    REQUIRE(differ_after(ranks, textbook, 41, spoil) == "");
    ranks.resume();  // its momentum in signs
    REQUIRE(differ_after(ranks, textbook, 139, spoil) == "");
    REQUIRE(textbook.attempts == 200);
    REQUIRE(textbook.skipped == 4);
    // The resumed optimizers have seen no more than the last of them: attempt 89.
    for (const auto& optimizer : ranks.optimizers) REQUIRE(optimizer->skipped_steps() == 1);
  }
}

TEST_CASE("a million elements of 1-bit LAMB are the textbook's to the bit", "[onebit_lamb]") {
  const std::vector<OneBitLambGroup> groups = {
      {{{1001}, {1000003}}, OneBitLambOptions(0.01).freeze_step(1).weight_decay(0.1)}};
  OneBitLambRanks ranks(4, groups);
  OneBitLambTextbook textbook = textbook_of(ranks, groups);
  REQUIRE(differ_after(ranks, textbook, 4, nullptr, /*whole_every=*/2) == "");
}

TEST_CASE("without signs, 1-bit LAMB's steps behind the freeze are the textbook's", "[onebit_lamb]") {
  for (const int world_size : {1, 3}) {
    CAPTURE(world_size);
    const auto options = OneBitLambOptions(0.01).freeze_step(3).one_bit(world_size == 1);
    auto groups = two_groups(options);
    groups.push_back({{{300}}, OneBitLambOptions(options).adapt(false)});
    OneBitLambRanks ranks(world_size, groups);
    OneBitLambTextbook textbook = textbook_of(ranks, groups);
    REQUIRE(differ_after(ranks, textbook, 30) == "");
    REQUIRE(textbook.frozen_at == 3);
    for (const auto& optimizer : ranks.optimizers) {
      REQUIRE(optimizer->bytes_sent() == 0);
      REQUIRE(optimizer->export_rank_state().empty());
      REQUIRE(optimizer->gradient_scope() == GradientScope::world);
      REQUIRE(optimizer->compression_error() == 0);
    }
  }
}

TEST_CASE("a group with compress(false) is FusedLamb's to the bit while others are compressed",
          "[onebit_lamb]") {
  for (const int world_size : {1, 2, 5}) {
    CAPTURE(world_size);
    const auto options = OneBitLambOptions(0.01).freeze_step(3).compress_alone(true);
    const auto touchy = OneBitLambOptions(options).compress(false).lr(0.002).weight_decay(0.3).max_coeff(2);
    const std::vector<OneBitLambGroup> groups = {{{{300}, {}}, options}, {{{41}, {1}, {9, 9}}, touchy}};
    OneBitLambRanks ranks(world_size, groups);
    OneBitLambTextbook textbook = textbook_of(ranks, groups);
    const auto all = clones(ranks.parameters[0]);
    const std::vector<Tensor> twins(all.begin() + 2, all.end());
    FusedLamb peer(twins, lamb_like(touchy));
    for (int64_t t = 0; t < 20; ++t) {
      const auto gradients = ranks.gradients(t);
      REQUIRE(differ_after(ranks, textbook, 1) == "");
      step_with_mean(peer, twins, gradients, /*first=*/2);
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const auto& own = ranks.parameters[rank];
        REQUIRE(same_bits(std::vector<Tensor>(own.begin() + 2, own.end()), twins));
      }
    }
  }
}

TEST_CASE("behind 1-bit LAMB's freeze a gradient that is missing counts as zero", "[onebit_lamb]") {
  for (const int world_size : {1, 3}) {
    for (const bool bias_correction : {true, false}) {
      CAPTURE(world_size, bias_correction);
      const auto options =
          OneBitLambOptions(0.01).freeze_step(3).compress_alone(true).bias_correction(bias_correction);
      const std::vector<OneBitLambGroup> groups = {{{{50}, {200}, {33}}, options}};
      OneBitLambRanks ranks(world_size, groups);
      OneBitLambTextbook textbook = textbook_of(ranks, groups);
      // The first parameter is reached late, the last one on the last rank never again.
      REQUIRE(differ_after(ranks, textbook, 20, [](int64_t attempt, OneBitLambRanks::Gradients& gradients) {
                for (auto& of_rank : gradients) {
                  if (attempt < 6) of_rank[0] = Tensor();
                }
                if (attempt >= 4) gradients.back()[2] = Tensor();
              }) == "");
    }
  }
}

}  // namespace pacer::testing::onebit_lamb_steps
