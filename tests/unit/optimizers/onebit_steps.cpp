// The steps of all 1-bit optimizers against their textbooks, to the bit: warm-up, compressed steps on any
// number of ranks, full precision behind the freeze, and groups that are not compressed.
#include "support/catch.h"

#include "support/kernels/lamb.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_peers.h"

namespace pacer::testing::onebit_steps {
namespace {

using Gradients = std::vector<std::vector<Tensor>>;  // [rank][parameter]

// Settings that a second group may have of its own.
OneBitAdamOptions others(const OneBitAdamOptions& options) {
  return OneBitAdamOptions(options).lr(3e-3).betas({0.8, 0.95}).eps(1e-6).weight_decay(0);
}
OneBitLambOptions others(const OneBitLambOptions& options) {
  auto other = OneBitLambOptions(options).lr(3e-3).betas({0.8, 0.95}).eps(1e-4).weight_decay(0);
  return other.max_coeff(0.3).coeff_beta(0.7);
}

// Odd sizes, one element, none, and more than a row.
GroupsOf<OneBitAdam> odd_groups(const OneBitAdamOptions& options) {
  return {{{{37, 13}, {0, 3}, {1}}, options}, {{{129}, {4097}}, others(options)}};
}
GroupsOf<OneBitLamb> odd_groups(const OneBitLambOptions& options) {
  return {{{{37, 13}, {0, 3}, {1}}, options},
          {{{129}, {4097}}, others(options)},
          {{{20}}, OneBitLambOptions(options).adapt(false)}};
}

// Whatever changes what a compressed step does.
std::vector<GroupsOf<OneBitAdam>> variants(const OneBitAdamOptions& plain) {
  using O = OneBitAdamOptions;
  return {
      odd_groups(plain),
      odd_groups(O(plain).refresh_variance_every(5).weight_decay(0)),
      odd_groups(O(plain).bias_correction(false).scale(ScaleNorm::l1).variance_floor(0)),
      odd_groups(O(plain).block_scales(true).refresh_variance_every(3)),
  };
}
std::vector<GroupsOf<OneBitLamb>> variants(const OneBitLambOptions& plain) {
  using O = OneBitLambOptions;
  std::vector<GroupsOf<OneBitLamb>> all = {
      odd_groups(plain),
      odd_groups(O(plain).bias_correction(true).weight_decay(0).factor_max(4)),
      odd_groups(O(plain).scale(ScaleNorm::l1).variance_floor(0).max_coeff(1.0).factor_max(4)),
      odd_groups(O(plain).block_scales(true).factor_threshold(0.5).factor_min(0.01).factor_max(100)),
      odd_groups(O(plain).adapt(false).bias_correction(true)),
  };
  all.back()[1].options.adapt(true);
  return all;
}

}  // namespace

TEMPLATE_TEST_CASE("freeze_step(T) means T steps that are FusedAdamW's or FusedLamb's to the bit",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  for (const int world_size : {1, 3}) {
    for (const bool bias_correction : {true, false}) {
      CAPTURE(world_size, bias_correction);
      const auto options = OptionsOf<TestType>(0.01).weight_decay(0.1).bias_correction(bias_correction);
      const auto groups = odd_groups(OptionsOf<TestType>(options).freeze_step(5).compress_alone(true));
      OneBitRanks<TestType> ranks(world_size, groups);
      const auto twins = clones(ranks.parameters[0]);
      const auto peer = peer_of<TestType>(groups, twins);
      for (int64_t t = 1; t <= 6; ++t) {
        const auto gradients = ranks.gradients(t);
        REQUIRE(ranks.step(gradients) == "");
        step_with_mean(*peer, twins, gradients);
        for (size_t rank = 0; rank < ranks.size(); ++rank) {
          const TestType& optimizer = *ranks.optimizers[rank];
          CAPTURE(t, rank);
          REQUIRE(same_bits(ranks.parameters[rank], twins) == (t <= 5));
          REQUIRE((optimizer.phase() == OneBitPhase::compressed) == (t >= 5));
          REQUIRE(optimizer.frozen_at() == (t >= 5 ? std::optional<int64_t>(5) : std::nullopt));
          REQUIRE(optimizer.attempts() == t);
          REQUIRE((contract(optimizer).gradient_scope() == GradientScope::rank) == (t >= 5));
          if (t >= 5) continue;
          const auto own = optimizer.export_state(), wanted = peer->export_state();
          for (const Tensor& twin : twins) {
            const std::string name = peer->parameter_name(twin);
            REQUIRE(same_bits(own.at(name + "/exp_avg"), wanted.at(name + "/exp_avg")));
            REQUIRE(same_bits(own.at(name + "/exp_avg_sq"), wanted.at(name + "/exp_avg_sq")));
          }
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("compressed steps are the textbook's to the bit on every number of ranks",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  const auto plain = OptionsOf<TestType>(0.01).freeze_step(4).compress_alone(true).weight_decay(0.1);
  for (const int world_size : {1, 2, 3, 4, 7, 8}) {
    int variant = 0;
    for (const GroupsOf<TestType>& groups : variants(plain)) {
      CAPTURE(world_size, variant++);
      OneBitRanks<TestType> ranks(world_size, groups);
      auto textbook = textbook_of(ranks, groups);
      REQUIRE(differ_after(ranks, textbook, 16) == "");
      REQUIRE(textbook.frozen_at == 4);
      for (size_t rank = 1; rank < ranks.size(); ++rank) {
        REQUIRE(same_bits(ranks.parameters[0], ranks.parameters[rank]));
      }
    }
  }
}

TEMPLATE_TEST_CASE("200 steps with refreshes, skipped steps and four resumes are the textbook's to the bit",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  for (const int world_size : {1, 4}) {
    CAPTURE(world_size);
    const O options = Family<TestType>::refreshed(O(0.01).freeze_step(20).compress_alone(true), 7);
    const GroupsOf<TestType> groups = {{{{31}, {0}, {5, 67}}, options},
                                       {{{1}, {260}}, O(options).weight_decay(0)}};
    OneBitRanks<TestType> ranks(world_size, groups);
    auto textbook = textbook_of(ranks, groups);
    // In warm-up, at the freeze itself, in a compressed step, and in place of a refresh (attempt 70 + 20).
    const GradientEdit spoil = [&](int64_t attempt, Gradients& gradients) {
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
    REQUIRE(differ_after(ranks, textbook, 7, spoil) == "");
    REQUIRE((textbook.attempts - 20) % 7 == 6);
    REQUIRE(differ_after(ranks, textbook, 1, spoil) == "");
    ranks.resume();  // its momentum whole, where this was a refresh
    REQUIRE(differ_after(ranks, textbook, 131, spoil) == "");
    REQUIRE(textbook.attempts == 200);
    REQUIRE(textbook.skipped == 4);
    // The resumed optimizers have seen no more than the last of them: attempt 89.
    for (const auto& optimizer : ranks.optimizers) REQUIRE(optimizer->skipped_steps() == 1);
  }
}

TEMPLATE_TEST_CASE("a million elements are the textbook's to the bit", "[onebit_adam][onebit_lamb]",
                   OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  const O options = Family<TestType>::refreshed(O(0.01).freeze_step(1).weight_decay(0.1), 3);
  const GroupsOf<TestType> groups = {{{{1001}, {1000003}}, options}};
  OneBitRanks<TestType> ranks(4, groups);
  auto textbook = textbook_of(ranks, groups);
  REQUIRE(differ_after(ranks, textbook, 4, nullptr, /*whole_every=*/2) == "");
}

TEMPLATE_TEST_CASE("without signs, steps behind the freeze are the textbook's and send no bytes of their own",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  for (const int world_size : {1, 3}) {
    CAPTURE(world_size);
    const O plain = O(0.01).freeze_step(3).one_bit(world_size == 1);
    const auto groups = odd_groups(Family<TestType>::refreshed(plain, world_size == 3 ? 4 : 0));
    OneBitRanks<TestType> ranks(world_size, groups);
    auto textbook = textbook_of(ranks, groups);
    REQUIRE(differ_after(ranks, textbook, 30) == "");
    REQUIRE(textbook.frozen_at == 3);
    for (const auto& optimizer : ranks.optimizers) {
      REQUIRE(optimizer->bytes_sent() == 0);
      REQUIRE(optimizer->export_rank_state().empty());
      REQUIRE(contract(*optimizer).gradient_scope() == GradientScope::world);
      REQUIRE(optimizer->compression_error() == 0);
    }
  }
}

TEMPLATE_TEST_CASE(
    "a group with compress(false) is FusedAdamW's or FusedLamb's to the bit while others are compressed",
    "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  for (const int world_size : {1, 2, 5}) {
    CAPTURE(world_size);
    const O options = Family<TestType>::refreshed(O(0.01).freeze_step(3).compress_alone(true), 4);
    const O touchy = others(options).compress(false).weight_decay(0.3);
    const GroupsOf<TestType> groups = {{{{300}, {}}, options}, {{{41}, {1}, {9, 9}}, touchy}};
    OneBitRanks<TestType> ranks(world_size, groups);
    auto textbook = textbook_of(ranks, groups);
    const auto all = clones(ranks.parameters[0]);
    const std::vector<Tensor> twins(all.begin() + 2, all.end());
    const auto peer = peer_of<TestType>({groups[1]}, twins);
    for (int64_t t = 0; t < 20; ++t) {
      const auto gradients = ranks.gradients(t);
      REQUIRE(differ_after(ranks, textbook, 1) == "");
      step_with_mean(*peer, twins, gradients, /*first=*/2);
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const auto& own = ranks.parameters[rank];
        REQUIRE(same_bits(std::vector<Tensor>(own.begin() + 2, own.end()), twins));
      }
    }
  }
}

TEMPLATE_TEST_CASE("behind the freeze a gradient that is missing counts as zero",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  for (const int world_size : {1, 3}) {
    for (const bool bias_correction : {true, false}) {
      CAPTURE(world_size, bias_correction);
      const O plain = O(0.01).freeze_step(3).compress_alone(true).bias_correction(bias_correction);
      const GroupsOf<TestType> groups = {{{{50}, {200}, {33}}, Family<TestType>::refreshed(plain, 5)}};
      OneBitRanks<TestType> ranks(world_size, groups);
      auto textbook = textbook_of(ranks, groups);
      // The first parameter is reached late, the last one on the last rank never again.
      REQUIRE(differ_after(ranks, textbook, 20, [](int64_t attempt, Gradients& gradients) {
                for (auto& of_rank : gradients) {
                  if (attempt < 6) of_rank[0] = Tensor();
                }
                if (attempt >= 4) gradients.back()[2] = Tensor();
              }) == "");
    }
  }
}

}  // namespace pacer::testing::onebit_steps
