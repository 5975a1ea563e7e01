// OneBitAdam frozen after a single step (N3): how far a variance that was hardly or never fed lets parameters
// drift, and the bound of Adam's steps that holds them.
#include <algorithm>
#include <cmath>
#include <utility>

#include <pacer/kernels/math/onebit_adam.h>

#include "support/catch.h"

#include "support/optimizers/onebit_adam_ranks.h"

namespace pacer::testing::onebit_adam_numbers {
namespace {

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
    const OneBitMethodParameter& p = textbook.parameters[i];
    const auto before = fp32_values(start[i]);
    for (size_t k = i == 0 ? 320 : 0; k < p.value.size(); ++k) {
      const double drift =
          std::fabs(static_cast<double>(p.value[k]) - before[k]) / 1e-3;  // in learning rates
      CAPTURE(i, k, drift, largest_debt[p.offset + k], p.floor);
      // Rows of a parameter that has some variance stay; one that has none at all is trained.
      REQUIRE((drift > 0) == (i == 1));
      if (i == 0) continue;
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

TEST_CASE("N3: no step is larger than Adam's can be, with a floor or without", "[onebit_adam]") {
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
  const double most = 0.1 / std::sqrt(0.001) / std::sqrt(1 - 0.81 / 0.999);  // |m| / sqrt(v)
  CHECK(guarded <= 1.0001 * most / (1 - 0.81));  // the first step after the freeze
  CHECK(unguarded <= 1.0001 * most / (1 - 0.81));
}

TEST_CASE("the bound of |m| / sqrt(v) is what gradients can reach, and no more", "[onebit_adam]") {
  const std::pair<double, double> betas[] = {
      {0.9, 0.999}, {0.9, 0.99}, {0.5, 0.999}, {0.9, 0.9}, {0.95, 0.95}};
  for (const auto& [beta1, beta2] : betas) {
    CAPTURE(beta1, beta2);
    // The gradients for which the inequality of Cauchy and Schwarz is an equality.
    double m = 0, v = 0, reached = 0;
    for (int age = 399; age >= 0; --age) {
      const double gradient = std::pow(beta1 / beta2, age);
      m = beta1 * m + (1 - beta1) * gradient;
      v = beta2 * v + (1 - beta2) * gradient * gradient;
      reached = std::max(reached, m / std::sqrt(v));
    }
    CHECK(reached == Catch::Approx(kernels::largest_direction(beta1, beta2)).epsilon(1e-6));
  }
}

}  // namespace pacer::testing::onebit_adam_numbers
