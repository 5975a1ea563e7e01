// OneBitAdam's steps against the textbook, to the bit: warm-up, compressed steps on any number of ranks, full
// precision behind the freeze, refreshes, and groups that are not compressed.
#include "support/catch.h"

#include "support/onebit_adam_ranks.h"

namespace pacer::testing::onebit_steps {
namespace {

// Odd sizes, one element, none, and more than a row; the second group with settings of its own.
std::vector<OneBitAdamGroup> two_groups(const OneBitAdamOptions& options) {
  const auto other = OneBitAdamOptions(options).lr(3e-3).betas({0.8, 0.95}).eps(1e-6).weight_decay(0);
  return {{{{37, 13}, {0, 3}, {1}}, options}, {{{129}, {4097}}, other}};
}

FusedAdamWOptions adamw_like(const OneBitAdamOptions& o) {
  return FusedAdamWOptions(o.lr())
      .betas(o.betas())
      .eps(o.eps())
      .weight_decay(o.weight_decay())
      .bias_correction(o.bias_correction());
}

// FusedAdamW takes a step with the mean of all ranks' gradients, added in rank order.
void step_with_mean(FusedAdamW& peer, const std::vector<Tensor>& parameters,
                    const OneBitAdamRanks::Gradients& gradients, size_t first = 0) {
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

TEST_CASE("freeze_step(T) means T steps that are FusedAdamW's to the bit", "[onebit_adam]") {
  for (const int world_size : {1, 3}) {
    for (const bool bias_correction : {true, false}) {
      CAPTURE(world_size, bias_correction);
      const auto options = OneBitAdamOptions(0.01).weight_decay(0.1).bias_correction(bias_correction);
      const auto groups = two_groups(OneBitAdamOptions(options).freeze_step(5).compress_alone(true));
      OneBitAdamRanks ranks(world_size, groups);
      auto twins = clones(ranks.parameters[0]);
      std::vector<torch::optim::OptimizerParamGroup> peers;
      peers.emplace_back(std::vector<Tensor>(twins.begin(), twins.begin() + 3),
                         std::make_unique<FusedAdamWOptions>(adamw_like(groups[0].options)));
      peers.emplace_back(std::vector<Tensor>(twins.begin() + 3, twins.end()),
                         std::make_unique<FusedAdamWOptions>(adamw_like(groups[1].options)));
      FusedAdamW peer(peers, adamw_like(options));
      for (int64_t t = 1; t <= 6; ++t) {
        const auto gradients = ranks.gradients(t);
        REQUIRE(ranks.step(gradients) == "");
        step_with_mean(peer, twins, gradients);
        for (int rank = 0; rank < world_size; ++rank) {
          const OneBitAdam& optimizer = *ranks.optimizers[static_cast<size_t>(rank)];
          CAPTURE(t, rank);
          REQUIRE(same_bits(ranks.parameters[static_cast<size_t>(rank)], twins) == (t <= 5));
          REQUIRE((optimizer.phase() == OneBitPhase::compressed) == (t >= 5));
          REQUIRE(optimizer.frozen_at() == (t >= 5 ? std::optional<int64_t>(5) : std::nullopt));
          REQUIRE(optimizer.attempts() == t);
          REQUIRE((optimizer.gradient_scope() == GradientScope::rank) == (t >= 5));
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

TEST_CASE("compressed steps are the textbook's to the bit on every number of ranks", "[onebit_adam]") {
  const auto plain = OneBitAdamOptions(0.01).freeze_step(4).compress_alone(true).weight_decay(0.1);
  for (const int world_size : {1, 2, 3, 4, 7, 8}) {
    for (const int kind : {0, 1, 2, 3}) {
      CAPTURE(world_size, kind);
      OneBitAdamOptions options = plain;
      if (kind == 1) options.refresh_variance_every(5).weight_decay(0);
      if (kind == 2) options.bias_correction(false).scale(kernels::ScaleNorm::l1).variance_floor(0);
      if (kind == 3) options.block_scales(true).refresh_variance_every(3);
      const auto groups = two_groups(options);
      OneBitAdamRanks ranks(world_size, groups);
      OneBitAdamTextbook textbook = textbook_of(ranks, groups);
      REQUIRE(differ_after(ranks, textbook, 16) == "");
      REQUIRE(textbook.frozen_at == 4);
      for (size_t rank = 1; rank < ranks.size(); ++rank) {
        REQUIRE(same_bits(ranks.parameters[0], ranks.parameters[rank]));
      }
    }
  }
}

TEST_CASE("200 steps with refreshes, skipped steps and two resumes are the textbook's to the bit",
          "[onebit_adam]") {
  for (const int world_size : {1, 4}) {
    CAPTURE(world_size);
    const auto options =
        OneBitAdamOptions(0.01).freeze_step(20).compress_alone(true).refresh_variance_every(7);
    const std::vector<OneBitAdamGroup> groups = {{{{31}, {0}, {5, 67}}, options},
                                                 {{{1}, {260}}, OneBitAdamOptions(options).weight_decay(0)}};
    OneBitAdamRanks ranks(world_size, groups);
    OneBitAdamTextbook textbook = textbook_of(ranks, groups);
    // In warm-up, at the freeze itself, in a compressed step, and in place of a refresh (attempt 70 + 20).
    const GradientEdit spoil = [&](int64_t attempt, OneBitAdamRanks::Gradients& gradients) {
      if (attempt != 5 && attempt != 19 && attempt != 50 && attempt != 89) return;
      gradients.back()[2].view({-1})[11] = NAN;
    };
    REQUIRE(differ_after(ranks, textbook, 13, spoil) == "");
    ranks.resume();  // in warm-up
    REQUIRE(differ_after(ranks, textbook, 48, spoil) == "");
    ranks.resume();  // its momentum in signs
    REQUIRE(differ_after(ranks, textbook, 7, spoil) == "");
    REQUIRE((textbook.attempts - 20) % 7 == 6);
    REQUIRE(differ_after(ranks, textbook, 1, spoil) == "");
    ranks.resume();  // its momentum whole
    REQUIRE(differ_after(ranks, textbook, 131, spoil) == "");
    REQUIRE(textbook.attempts == 200);
    REQUIRE(textbook.skipped == 4);
    REQUIRE(textbook.frozen_at == 20);
    // The resumed optimizers have seen no more than the last of them: attempt 89.
    for (const auto& optimizer : ranks.optimizers) REQUIRE(optimizer->skipped_steps() == 1);
  }
}

TEST_CASE("a million elements are the textbook's to the bit", "[onebit_adam]") {
  const auto options = OneBitAdamOptions(0.01).freeze_step(1).refresh_variance_every(3);
  const std::vector<OneBitAdamGroup> groups = {{{{1001}, {1000003}}, options}};
  OneBitAdamRanks ranks(4, groups);
  OneBitAdamTextbook textbook = textbook_of(ranks, groups);
  REQUIRE(differ_after(ranks, textbook, 4, nullptr, /*whole_every=*/2) == "");
}

TEST_CASE("without signs, steps behind the freeze are Adam's with a variance that stands still",
          "[onebit_adam]") {
  for (const int world_size : {1, 3}) {
    CAPTURE(world_size);
    const auto options =
        OneBitAdamOptions(0.01).freeze_step(3).refresh_variance_every(world_size == 3 ? 4 : 0);
    const auto groups = two_groups(OneBitAdamOptions(options).one_bit(world_size == 1));
    OneBitAdamRanks ranks(world_size, groups);
    OneBitAdamTextbook textbook = textbook_of(ranks, groups);
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

TEST_CASE("a group with compress(false) is FusedAdamW's to the bit while others are compressed",
          "[onebit_adam]") {
  for (const int world_size : {1, 2, 5}) {
    CAPTURE(world_size);
    const auto options =
        OneBitAdamOptions(0.01).freeze_step(3).compress_alone(true).refresh_variance_every(4);
    const auto touchy = OneBitAdamOptions(options).compress(false).lr(0.002).weight_decay(0.3);
    const std::vector<OneBitAdamGroup> groups = {{{{300}, {}}, options}, {{{41}, {1}, {9, 9}}, touchy}};
    OneBitAdamRanks ranks(world_size, groups);
    OneBitAdamTextbook textbook = textbook_of(ranks, groups);
    const auto all = clones(ranks.parameters[0]);
    const std::vector<Tensor> twins(all.begin() + 2, all.end());
    FusedAdamW peer(twins, adamw_like(touchy));
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

TEST_CASE("behind the freeze a gradient that is missing counts as zero", "[onebit_adam]") {
  for (const int world_size : {1, 3}) {
    CAPTURE(world_size);
    const auto options =
        OneBitAdamOptions(0.01).freeze_step(3).compress_alone(true).refresh_variance_every(5);
    const std::vector<OneBitAdamGroup> groups = {{{{50}, {200}, {33}}, options}};
    OneBitAdamRanks ranks(world_size, groups);
    OneBitAdamTextbook textbook = textbook_of(ranks, groups);
    // The first parameter is reached late, the last one on the last rank never again.
    REQUIRE(differ_after(ranks, textbook, 20, [](int64_t attempt, OneBitAdamRanks::Gradients& gradients) {
              for (auto& of_rank : gradients) {
                if (attempt < 6) of_rank[0] = Tensor();
              }
              if (attempt >= 4) gradients.back()[2] = Tensor();
            }) == "");
  }
}

}  // namespace pacer::testing::onebit_steps
