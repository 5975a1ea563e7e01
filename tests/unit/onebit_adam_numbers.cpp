// OneBitAdam and difficult numbers: gradients that are not finite (N2), a variance that was hardly or never
// fed (N3), and 16-bit parameters.
#include <limits>

#include "support/catch.h"

#include "support/half_reference.h"
#include "support/onebit_adam_ranks.h"
#include "support/onebit_refusals.h"

namespace pacer::testing::onebit_numbers {
namespace {

struct Place {
  size_t parameter;
  int64_t element;
};

// "" if attempt number `attempt`, with one number that is not finite, changes nothing, and what follows is
// what it would be had it only been counted.
std::string unless_skipped(at::ScalarType dtype, int64_t attempt, size_t spoilt_rank, const Place& place,
                           float value) {
  const auto options = OneBitAdamOptions(0.01).freeze_step(3).refresh_variance_every(3);
  const std::vector<OneBitAdamGroup> groups = {{{{130}, {1}, {0, 2}, {300}}, options},
                                               {{{17}}, OneBitAdamOptions(options).compress(false)}};
  OneBitAdamRanks ranks(3, groups, dtype);
  OneBitAdamTextbook textbook = textbook_of(ranks, groups);
  for (int64_t t = 0; t < attempt + 4; ++t) {
    auto gradients = ranks.gradients(t);
    if (t == attempt) gradients[spoilt_rank][place.parameter].view({-1})[place.element] = value;
    const auto before = t == attempt ? everything(ranks) : std::vector<NamedTensors>();
    const std::string message = ranks.step(gradients);
    if (!message.empty()) return message;
    textbook.step(textbook_gradients(gradients));
    const std::string changed = t == attempt ? first_change(before, everything(ranks)) : "";
    if (!changed.empty()) return "changed: " + changed;
    const std::string different = difference_from(textbook, ranks, /*whole=*/t > attempt);
    if (!different.empty()) return different + " after attempt " + std::to_string(t);
    for (const auto& optimizer : ranks.optimizers) {
      if (optimizer->skipped_steps() != (t >= attempt ? 1 : 0)) return "skipped_steps";
    }
  }
  return "";
}

// Rows from 40 on, and all of the second parameter, are never touched; the third one's gradient is constant.
std::vector<OneBitAdamGroup> hardly_fed(const OneBitAdamOptions& options) {
  return {{{{64, 8}, {33}, {100}}, options}};
}
OneBitAdamRanks::Gradients sparse_gradients(const OneBitAdamRanks& ranks, int64_t attempt) {
  auto gradients = ranks.gradients(attempt);
  for (auto& of_rank : gradients) {
    of_rank[0].narrow(0, 40, 24).zero_();
    of_rank[1].zero_();
    of_rank[2].fill_(0.01);
  }
  return gradients;
}

}  // namespace

TEST_CASE("N2: a gradient that is not finite on one rank changes nothing on any", "[onebit_adam]") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  // The last one is finite, but its square is not.
  const float values[] = {NAN, kInfinity, -kInfinity, 3e38f};
  // First, at the edges of a byte and of a unit of padding, last before the padding, alone, in the middle,
  // last, and where nothing is compressed.
  const Place places[] = {{0, 0}, {0, 7}, {0, 127}, {0, 128}, {0, 129}, {1, 0}, {3, 150}, {3, 299}, {4, 16}};
  size_t number = 0;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t attempt : {1, 3, 5}) {  // warm-up, the first that is compressed, a refresh
      for (size_t rank = 0; rank < 3; ++rank) {
        for (const Place& place : places) {
          const float value = values[number++ % 4];
          CAPTURE(dtype, attempt, rank, place.parameter, place.element, value);
          REQUIRE(unless_skipped(dtype, attempt, rank, place, value) == "");
        }
      }
    }
  }
}

TEST_CASE("N3: frozen after one step, what is never touched drifts no further than its errors allow",
          "[onebit_adam]") {
  const auto options = OneBitAdamOptions(1e-3).freeze_step(1).weight_decay(0);
  const auto groups = hardly_fed(options);
  OneBitAdamRanks ranks(2, groups);
  OneBitAdamTextbook textbook = textbook_of(ranks, groups);
  const auto start = clones(ranks.parameters[0]);
  std::vector<float> largest_debt(textbook.exchange.server_error.size(), 0);
  for (int64_t t = 0; t < 1000; ++t) {
    const auto gradients = sparse_gradients(ranks, t);
    REQUIRE(ranks.step(gradients) == "");
    textbook.step(textbook_gradients(gradients));
    for (size_t k = 0; k < largest_debt.size(); ++k) {
      const float mean = (textbook.exchange.worker_errors[0][k] + textbook.exchange.worker_errors[1][k]) / 2;
      largest_debt[k] = std::max(largest_debt[k], std::fabs(mean + textbook.exchange.server_error[k]));
    }
  }
  REQUIRE(difference_from(textbook, ranks) == "");
  for (const Tensor& p : ranks.parameters[0]) REQUIRE(p.isfinite().all().item<bool>());
  // Without gradients m_t = b1 m_(t-1) + x_(t-1) - x_t, where x_t is what the exchange owes (mean worker
  // error plus server error), so that |m_1 + ... + m_t| <= max|x| / (1 - b1) for every t. The weights 1 / c1
  // of the momenta fall from that of the second step, so they make at most its multiple of it; the divisor
  // stands still at the root of the floor.
  const double per_debt = 1 / (1 - 0.9) / (1 - 0.9 * 0.9);
  for (const size_t i : {0u, 1u}) {
    const OneBitAdamParameter& p = textbook.parameters[i];
    const auto before = fp32_values(start[i]);
    for (size_t k = i == 0 ? 320 : 0; k < p.value.size(); ++k) {
      const double drift =
          std::fabs(static_cast<double>(p.value[k]) - before[k]) / 1e-3;  // in learning rates
      CAPTURE(i, k, drift, largest_debt[p.offset + k], p.floor);
      REQUIRE(drift > 0);
      REQUIRE(drift <= 1.001 * per_debt * largest_debt[p.offset + k] / std::sqrt(p.floor));
      REQUIRE(drift <= 50);
    }
  }
  CHECK(
      contains(ranks.said[0], "a mean of 1 squared gradients is still noisy; set freeze_step to 50 or more"));
  CHECK(contains(ranks.said[0], "give that parameter a group with compress(false)"));
  CHECK(contains(ranks.said[0], "less variance than their tensor's floor"));
  CHECK(ranks.said[1].empty());
}

TEST_CASE("N3: the floor keeps sign noise from becoming huge steps", "[onebit_adam]") {
  const auto largest_step = [](double floor) {
    const auto options = OneBitAdamOptions(1e-3).freeze_step(1).weight_decay(0).variance_floor(floor);
    OneBitAdamRanks ranks(2, hardly_fed(options));
    double largest = 0;
    for (int64_t t = 0; t < 50; ++t) {
      const auto before = clones(ranks.parameters[0]);
      REQUIRE(ranks.step(sparse_gradients(ranks, t)) == "");
      largest = std::max(largest, distance(before, ranks.parameters[0]) / 1e-3);
    }
    return largest;
  };
  const double guarded = largest_step(0.01), unguarded = largest_step(0);
  CAPTURE(guarded, unguarded);
  CHECK(guarded <= 100);
  CHECK(unguarded >= 1e4 * guarded);
}

TEST_CASE("16-bit parameters are the textbook's fp32 values, to the bit, and those rounded",
          "[onebit_adam]") {
  const std::pair<at::ScalarType, MasterWeights> kinds[] = {{at::kBFloat16, MasterWeights::remainder},
                                                            {at::kBFloat16, MasterWeights::automatic},
                                                            {at::kBFloat16, MasterWeights::fp32},
                                                            {at::kHalf, MasterWeights::automatic}};
  for (const auto& [dtype, master_weights] : kinds) {
    for (const int world_size : {1, 2, 3, 4}) {
      CAPTURE(dtype, static_cast<int>(master_weights), world_size);
      auto options = OneBitAdamOptions(0.01).freeze_step(3).compress_alone(true).refresh_variance_every(6);
      options.master_weights(master_weights).weight_decay(0.1);
      const std::vector<OneBitAdamGroup> groups = {{{{35, 3}, {1}, {0}, {2049}}, options},
                                                   {{{50}}, OneBitAdamOptions(options).compress(false)}};
      OneBitAdamRanks ranks(world_size, groups, dtype);
      OneBitAdamTextbook textbook = textbook_of(ranks, groups);
      for (int64_t t = 0; t < 30; ++t) {
        const auto gradients = ranks.gradients(t);
        REQUIRE(ranks.step(gradients) == "");
        textbook.step(textbook_gradients(gradients));
        REQUIRE(difference_from(textbook, ranks) == "");
        if (t == 11) ranks.resume();
      }
      const bool has_remainder = dtype == at::kBFloat16 && master_weights != MasterWeights::fp32;
      for (size_t i = 0; i < textbook.parameters.size(); ++i) {
        const auto stored = to_doubles(ranks.parameters.back()[i]);
        for (size_t k = 0; k < stored.size(); ++k) {
          const HalfFormat format = dtype == at::kHalf ? kFloat16Format : kBFloat16Format;
          const Ties ties = has_remainder ? Ties::away : Ties::to_even;
          REQUIRE(stored[k] == nearest_half(textbook.parameters[i].value[k], format, ties));
        }
      }
    }
  }
}

}  // namespace pacer::testing::onebit_numbers
