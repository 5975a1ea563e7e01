// OneBitLamb where the answer is known without it: steps done by hand, scales, coefficients and factors in
// closed form, and steps without signs restated in double precision.
#include "support/catch.h"
#include "support/heard_warnings.h"

#include "support/kernels/lamb_reference.h"
#include "support/optimizers/onebit_lamb_ranks.h"

namespace pacer::testing::onebit_lamb_closed_forms {
namespace {

// A parameter of one rank and its optimizer.
struct Single {
  Tensor parameter;
  OneBitLamb optimizer;

  Single(const std::vector<float>& values, const OneBitLambOptions& options)
      : parameter(fp32_tensor(values).requires_grad_()),
        optimizer({parameter}, OneBitLambOptions(options).compress_vectors(true)) {}

  std::vector<float> step(const std::vector<float>& gradient) {
    std::string said;
    HeardWarnings ear(said);
    const c10::WarningUtils::WarningHandlerGuard guard(&ear);
    parameter.mutable_grad() = fp32_tensor(gradient);
    optimizer.step();
    return fp32_values(parameter);
  }
  std::vector<float> exported(const std::string& key) const {
    return fp32_values(optimizer.export_state().at("0.0/" + key));
  }
};

OneBitLambOptions by_hand() {
  return OneBitLambOptions(0.125)
      .betas({0.5, 0.75})
      .eps(0)
      .weight_decay(0)
      .freeze_step(1)
      .compress_alone(true)
      .factor_max(4)
      .factor_threshold(0.5);
}

// What m / d may be with these betas; 15 / 8 is more.
const double kMost = 0.5 / std::sqrt(0.25 * (1 - 0.25 / 0.75));

// 1-bit LAMB of one tensor on one rank whose momentum stays as it is, in fp64 (Li et al., algorithm 1): LAMB
// up to freeze().
class ReferenceOneBitLamb : public ReferenceLamb {
 public:
  using ReferenceLamb::ReferenceLamb;

  void warm_up(const std::vector<double>& gradient) {
    step(gradient);
    if (!rule.adapt) return;
    ratios = 0.9 * ratios + 0.1 * ratio;
    weights = 0.9 * weights + 0.1;
  }
  void freeze() {
    if (rule.bias_correction) {
      for (double& v : exp_avg_sq) v /= 1 - std::pow(rule.beta2, static_cast<double>(steps));
    }
    for (const double v : exp_avg_sq) floor += 0.01 * v / static_cast<double>(exp_avg_sq.size());
    for (const double v : exp_avg_sq) fresh.push_back(std::max(v, floor));  // bias-corrected
  }
  void compressed_step(const std::vector<double>& gradient) {
    ++steps;
    const auto t = static_cast<double>(steps);
    const double c1 = rule.bias_correction ? 1 - std::pow(rule.beta1, t) : 1;
    const double c2 = rule.bias_correction ? 1 - std::pow(rule.beta2, t) : 1;
    const double last_c2 = rule.bias_correction ? 1 - std::pow(rule.beta2, t - 1) : 1;
    std::vector<double> without_decay, update;
    double largest = 0;
    for (size_t k = 0; k < parameter.size(); ++k) {
      exp_avg[k] = rule.beta1 * exp_avg[k] + (1 - rule.beta1) * gradient[k];
      const double raw = rule.beta2 * fresh[k] * last_c2 + (1 - rule.beta2) * gradient[k] * gradient[k];
      fresh[k] = raw / c2;
      const double divisor = std::sqrt(std::max(exp_avg_sq[k], floor)) + rule.eps;
      largest = std::max(largest, divisor / (std::sqrt(fresh[k]) + rule.eps));
      const double most =
          (1 - rule.beta1) / std::sqrt((1 - rule.beta2) * (1 - rule.beta1 * rule.beta1 / rule.beta2));
      without_decay.push_back(std::min(std::max(exp_avg[k] / divisor, -most), most) / c1);
      update.push_back(without_decay[k] + rule.weight_decay * parameter[k]);
    }
    if (rule.adapt) {
      const double norm = euclidean_norm(update);
      const double k = norm > 0 ? std::min(1.0, euclidean_norm(without_decay) / norm) : 1;
      const double wanted = rule.weight_decay > 0 ? largest * k + 1 - k : largest;
      factor = std::min(std::max(std::min(std::max(wanted, 0.5), 4.0), 0.9 * factor), 1.1 * factor);
    }
    for (size_t k = 0; k < parameter.size(); ++k) {
      parameter[k] -= rule.lr * coefficient() * factor * update[k];
    }
  }
  double coefficient() const { return weights > 0 ? ratios / weights : 1; }

  double ratios = 0, weights = 0, floor = 0, factor = 1;
  std::vector<double> fresh;
};

}  // namespace

TEST_CASE("a step of 1-bit LAMB done by hand", "[onebit_lamb]") {
  Single run({3, -3}, by_hand());
  // m = 8, v = 64 and u = 1 everywhere, so that r = |p| / |u| = 3.
  CHECK(run.step({16, -16}) == std::vector<float>{2.625f, -2.625f});
  CHECK(run.optimizer.coefficient(run.parameter) == Catch::Approx(3).epsilon(1e-15));
  CHECK(run.optimizer.momentum_scale(run.parameter) == 1);
  CHECK(run.optimizer.factor(run.parameter) == 1);
  CHECK(run.optimizer.phase() == OneBitPhase::compressed);
  // New momentum (3, -21), of root mean square 15; what it stands for was a gradient of 2 * 15 - 8 = 22, so
  // that the fresh variance is (3 * 64 + 484) / 4 = 13^2 beside a frozen one of 8^2.
  const auto moved = run.step({-2, -34});
  CHECK(run.exported("exp_avg") == std::vector<float>{15, -15});
  CHECK(run.exported("exp_avg_sq") == std::vector<float>{64, 64});
  CHECK(fp32_values(run.optimizer.export_rank_state().at("0.0/worker_error")) == std::vector<float>{-12, -6});
  CHECK(run.optimizer.factor(run.parameter) == static_cast<double>(8.0f / 13.0f));
  CHECK(moved[0] == Catch::Approx(2.625 - 0.125 * 3 * (8.0 / 13) * kMost).epsilon(1e-6));
  CHECK(moved[1] == -moved[0]);
  CHECK(run.optimizer.coefficient(run.parameter) == Catch::Approx(3).epsilon(1e-15));
  // Another time: (7.5 + 7, -7.5 - 2) and what is owed, (-12, -6), make (2.5, -15.5).
  run.step({14, -4});
  const auto size = static_cast<float>(std::sqrt((2.5 * 2.5 + 15.5 * 15.5) / 2));
  CHECK(run.exported("exp_avg") == std::vector<float>{size, -size});
}

TEST_CASE("weight decay draws the factor towards 1, as far as it makes the update longer", "[onebit_lamb]") {
  Single run({3, -3}, by_hand().weight_decay(0.5));
  // u = 1 + 0.5 * 3, so that r = 3 / 2.5.
  CHECK(run.step({16, -16})[0] == Catch::Approx(3 - 0.125 * 3).epsilon(1e-6));
  const auto moved = run.step({-2, -34});
  const double u0 = kMost, u = u0 + 0.5 * 2.625, k = u0 / u, f = 8.0 / 13 * k + 1 - k;
  CHECK(run.optimizer.factor(run.parameter) == Catch::Approx(f).epsilon(1e-6));
  CHECK(moved[0] == Catch::Approx(2.625 - 0.125 * 1.2 * f * u).epsilon(1e-6));
  // Where decay makes it shorter, k is 1.
  Single against({-3, 3}, by_hand().weight_decay(0.125));
  against.step({16, -16});
  against.step({-2, -34});
  CHECK(against.optimizer.factor(against.parameter) == static_cast<double>(8.0f / 13.0f));
}

TEST_CASE("momenta are scaled to one size, and by 1024 at most", "[onebit_lamb]") {
  // After one step with beta1 = 0.5 a momentum is half its gradient.
  const auto scales = [](const std::vector<double>& gradients, int64_t without_elements) {
    std::vector<std::vector<int64_t>> shapes;
    for (size_t i = 0; i < gradients.size(); ++i) shapes.push_back({1 + 37 * static_cast<int64_t>(i % 2)});
    for (int64_t i = 0; i < without_elements; ++i) shapes.push_back({0});
    OneBitLambRanks ranks(2, {{shapes, OneBitLambOptions(0.01).betas({0.5, 0.9}).freeze_step(1)}});
    OneBitLambRanks::Gradients all(2);
    for (size_t rank = 0; rank < 2; ++rank) {
      for (size_t i = 0; i < shapes.size(); ++i) {
        const double size = i < gradients.size() ? gradients[i] : 0;
        all[rank].push_back(at::full_like(ranks.parameters[rank][i], size).detach());
      }
    }
    REQUIRE(ranks.step(all) == "");
    std::vector<double> found;
    for (const Tensor& p : ranks.parameters[1]) found.push_back(ranks.optimizers[1]->momentum_scale(p));
    return found;
  };
  const auto rounded = [](double value) { return static_cast<double>(static_cast<float>(value)); };
  CHECK(scales({3}, 0) == std::vector<double>{1});
  CHECK(scales({4, 1, 1, 2}, 0) == std::vector<double>{0.5, 2, 2, 1});
  // A momentum of zero counts as one of the tensors, one without elements does not.
  CHECK(scales({4, 2, 0}, 2) == std::vector<double>{0.5, 1, 1, 1, 1});
  CHECK(scales({1, 0, 0}, 0) == std::vector<double>{rounded(1.0 / 3), 1, 1});
  CHECK(scales({1, 1e-6}, 0)[1] == 1024);
  const auto many = scales(std::vector<double>(2, 1e-5), 0);
  CHECK(many == std::vector<double>{1, 1});
  std::vector<double> one_large(1100, 0.0);
  one_large[0] = 1;
  CHECK(scales(one_large, 0)[0] == 1.0 / 1024);
}

TEST_CASE("the coefficient is the average of the trust ratios, corrected for its start", "[onebit_lamb]") {
  // u = 1 everywhere without beta1 and beta2, so that r is the size of the parameter, within its bounds.
  const auto run = [](const OneBitLambOptions& options, int64_t steps) {
    Single single({8, -8}, OneBitLambOptions(options).betas({0.0, 0.0}).weight_decay(0).eps(0));
    std::vector<double> found = {single.optimizer.coefficient(single.parameter)};
    for (int64_t t = 0; t < steps; ++t) {
      single.step({3, -3});
      found.push_back(single.optimizer.coefficient(single.parameter));
    }
    return found;
  };
  const auto plain = OneBitLambOptions(0.5).freeze_step(4);
  // 8, 4, 2 and 1 with weights 1, 0.9, 0.81, 0.729 from the last; what comes after the freeze does not count.
  const auto averages = run(plain, 6);
  CHECK(averages[0] == 1);
  CHECK(averages[1] == Catch::Approx(8).epsilon(1e-14));
  CHECK(averages[2] == Catch::Approx((4 + 0.9 * 8) / 1.9).epsilon(1e-14));
  const double whole = (1 + 0.9 * 2 + 0.81 * 4 + 0.729 * 8) / (1 + 0.9 + 0.81 + 0.729);
  for (const size_t t : {4u, 5u, 6u}) CHECK(averages[t] == Catch::Approx(whole).epsilon(1e-14));
  // Without memory, the last one.
  CHECK(run(OneBitLambOptions(plain).coeff_beta(0), 4) == std::vector<double>{1, 8, 4, 2, 1});
  // What a bound has cut counts like any other.
  for (const double bound : run(OneBitLambOptions(plain).max_coeff(0.3), 6)) {
    CHECK((bound == 1 || bound == Catch::Approx(0.3).epsilon(1e-14)));
  }
  CHECK(run(OneBitLambOptions(plain).adapt(false), 6) == std::vector<double>(7, 1.0));
  // Nor is anything averaged where one of the norms is zero.
  Single zero({0, 0}, OneBitLambOptions(plain).betas({0.0, 0.0}).weight_decay(0));
  zero.step({0, 0});
  CHECK(zero.optimizer.coefficient(zero.parameter) == 1);
  zero.step({3, -3});  // its parameter still is
  CHECK(zero.optimizer.coefficient(zero.parameter) == 1);
  zero.step({3, -3});
  CHECK(zero.optimizer.coefficient(zero.parameter) == Catch::Approx(0.5).epsilon(1e-6));
}

TEST_CASE("the factor moves by a tenth a step, between its bounds", "[onebit_lamb]") {
  const auto factors = [](double later) {
    Single single({8, -8, 1},
                  OneBitLambOptions(0.01).betas({0.9, 0.5}).weight_decay(0).factor_max(4).freeze_step(1));
    single.step({3, -3, 1});
    std::vector<double> found;
    for (int64_t t = 0; t < 25; ++t) {
      const auto g = static_cast<float>(later);
      single.step({3 * g, -3 * g, g});
      found.push_back(single.optimizer.factor(single.parameter));
    }
    return found;
  };
  const auto rising = factors(0), falling = factors(100);
  double up = 1, down = 1;
  for (size_t t = 0; t < rising.size(); ++t) {
    CAPTURE(t);
    up = std::min(1.1 * up, 4.0);
    down = std::max(0.9 * down, 0.5);
    CHECK(rising[t] == Catch::Approx(up).epsilon(1e-14));
    CHECK(falling[t] == Catch::Approx(down).epsilon(1e-14));
  }
  CHECK(rising.back() == 4);
  CHECK(falling.back() == 0.5);
}

TEST_CASE("unless asked, the factor raises no rate", "[onebit_lamb]") {
  Single single({8, -8, 1}, OneBitLambOptions(0.01).betas({0.9, 0.5}).freeze_step(1));
  single.step({3, -3, 1});
  for (int64_t t = 0; t < 10; ++t) {
    single.step({0, 0, 0});  // the variance would have shrunk
    CHECK(single.optimizer.factor(single.parameter) == 1);
  }
}

TEST_CASE("a sign and its scale say all of a single element", "[onebit_lamb]") {
  const auto plain = OneBitLambOptions(0.01).weight_decay(0.1).freeze_step(3).bias_correction(true);
  Single by_sign({2}, OneBitLambOptions(plain).compress_alone(true)), whole({2}, plain);
  Samples samples(5);
  for (int64_t t = 0; t < 50; ++t) {
    const std::vector<float> gradient = {static_cast<float>(samples.uniform() - 0.5)};
    REQUIRE(by_sign.step(gradient) == whole.step(gradient));
    REQUIRE(by_sign.optimizer.factor(by_sign.parameter) == whole.optimizer.factor(whole.parameter));
    REQUIRE(by_sign.optimizer.compression_error() == 0);
  }
}

TEST_CASE("without signs, 1-bit LAMB follows the paper's rule in fp64", "[onebit_lamb]") {
  for (const bool bias_correction : {true, false}) {
    for (const double weight_decay : {0.0, 0.1}) {
      for (const bool adapt : {true, false}) {
        CAPTURE(bias_correction, weight_decay, adapt);
        LambRule rule;
        rule.lr = 0.02;
        rule.beta2 = 0.95;
        rule.eps = 1e-3;
        rule.weight_decay = weight_decay;
        rule.bias_correction = bias_correction;
        rule.adapt = adapt;
        const auto options = OneBitLambOptions(0.02)
                                 .betas({0.9, 0.95})
                                 .eps(1e-3)
                                 .weight_decay(weight_decay)
                                 .bias_correction(bias_correction)
                                 .adapt(adapt)
                                 .factor_max(4)
                                 .freeze_step(6);
        OneBitLambRanks ranks(1, {{{{200}}, options}});
        const Tensor& parameter = ranks.parameters[0][0];
        const OneBitLamb& optimizer = *ranks.optimizers[0];
        ReferenceOneBitLamb reference(rule, to_doubles(parameter));
        for (int64_t t = 0; t < 40; ++t) {
          auto gradients = ranks.gradients(t);
          gradients[0][0].mul_(t < 15 ? 1.0 : t < 25 ? 4.0 : 0.1);  // so that the factor moves both ways
          REQUIRE(ranks.step(gradients) == "");
          const auto gradient = to_doubles(gradients[0][0]);
          if (t < 6) reference.warm_up(gradient);
          if (t == 5) reference.freeze();
          if (t >= 6) reference.compressed_step(gradient);
          CAPTURE(t);
          CHECK(distance(parameter, torch::tensor(reference.parameter, at::kDouble)) <= 1e-4);
          CHECK(optimizer.coefficient(parameter) == Catch::Approx(reference.coefficient()).epsilon(1e-5));
          CHECK(optimizer.factor(parameter) == Catch::Approx(reference.factor).epsilon(1e-4));
        }
        CHECK((reference.factor == 1) == !adapt);
      }
    }
  }
}

}  // namespace pacer::testing::onebit_lamb_closed_forms
