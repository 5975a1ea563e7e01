// bf16 parameters without master weights: rounded to nearest, or stochastically and so, on average, not at
// all.
#include "support/catch.h"

#include <cmath>

#include "support/kernels/adam_reference.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

// One step from the optimizer's own state, in double, rounded to bf16 at the end.
TEST_CASE("pure bf16 to nearest is the exact step, rounded", "[fused_adam]") {
  torch::manual_seed(53);
  const Mode mode = all_modes()[4];
  auto parameters = random_parameters({{2000}}, at::kBFloat16);
  FusedAdamW optimizer(parameters, with_mode(FusedAdamWOptions(0.01).weight_decay(0.1), mode));
  int64_t elements = 0, other_neighbour = 0;
  for (int step = 1; step <= 20; ++step) {
    set_random_gradients(parameters);
    ReferenceAdam reference({0.01, 0.9, 0.999, 1e-8, 0.1, true, false, true}, to_doubles(parameters[0]));
    if (step > 1) {
      reference.exp_avg = to_doubles(state_of(optimizer, parameters[0]).exp_avg());
      reference.exp_avg_sq = to_doubles(state_of(optimizer, parameters[0]).exp_avg_sq());
      reference.steps = step - 1;
    }
    reference.step(to_doubles(parameters[0].grad()));
    optimizer.step();
    const auto& state = state_of(optimizer, parameters[0]);
    REQUIRE(state.exp_avg().scalar_type() == at::kBFloat16);
    const std::pair<Tensor, const std::vector<double>*> pairs[] = {
        {parameters[0], &reference.parameter},
        {state.exp_avg(), &reference.exp_avg},
        {state.exp_avg_sq(), &reference.exp_avg_sq}};
    for (const auto& [actual, exact] : pairs) {
      const auto values = to_doubles(actual);
      for (size_t i = 0; i < values.size(); ++i) {
        // To nearest: at most half a unit in the last place (8 bits) off, and fp32 rounding before that. The
        // moment may cancel: its fp32 error is relative to its terms, which are below 8.
        const double error = std::abs(values[i] - (*exact)[i]);
        REQUIRE(error <= std::ldexp(std::abs((*exact)[i]), -8) * 1.0001 + 8 * 0x1p-23);
        const double nearest = torch::tensor((*exact)[i], at::kDouble).to(at::kBFloat16).item<double>();
        ++elements;
        other_neighbour += values[i] != nearest;
      }
    }
  }
  // Where fp32 arithmetic crosses a midpoint; 0.9 m + 0.1 g of 8-bit numbers often is one.
  CHECK(other_neighbour <= elements / 500);
}

// First step, constant gradient: the exact result is 1 - lr for every element, between the bf16 numbers
// 1 - 2^-8 and 1.
Tensor stochastic_step(int64_t count, uint64_t seed, FusedAdamW* given = nullptr) {
  const Tensor parameter = torch::ones({count}, at::kBFloat16).requires_grad_();
  FusedAdamW optimizer({parameter},
                       with_mode(FusedAdamWOptions(1e-3).weight_decay(0).eps(0).seed(seed), all_modes()[5]));
  parameter.mutable_grad() = torch::full({count}, 0.5, at::kBFloat16);
  optimizer.step();
  if (given != nullptr) *given = std::move(optimizer);
  return parameter;
}

TEST_CASE("stochastic rounding is unbiased, and a function of the seed", "[fused_adam]") {
  constexpr int64_t kCount = 200000;
  constexpr double kUp = 1 - 1e-3 * 0x1p8;  // the probability of 1
  const double sigma = std::sqrt(kUp * (1 - kUp) / kCount);
  const uint64_t seeds[] = {0, 1, 7, 1ull << 40, ~0ull};
  std::vector<Tensor> ups;
  for (const uint64_t seed : seeds) {
    CAPTURE(seed);
    const Tensor result = stochastic_step(kCount, seed).detach();
    const Tensor up = result.eq(1);
    CHECK(result.eq(1 - 0x1p-8).logical_or(up).all().item<bool>());
    const Tensor bits = up.to(at::kDouble);
    CHECK(std::abs(bits.mean().item<double>() - kUp) <= 4 * sigma);
    // Neighbours, and elements one or eight draws apart, know nothing of each other.
    for (const int64_t lag : {1, 2, 4, 8, 64, 512}) {
      CAPTURE(lag);
      const Tensor product = (bits.slice(0, lag) - kUp) * (bits.slice(0, 0, kCount - lag) - kUp);
      CHECK(std::abs(product.mean().item<double>()) <= 4 * kUp * (1 - kUp) / std::sqrt(kCount - lag));
    }
    CHECK(same_bits(result, stochastic_step(kCount, seed)));
    for (const Tensor& other : ups) {
      const Tensor product = (bits - kUp) * (other - kUp);
      CHECK(std::abs(product.mean().item<double>()) <= 4 * kUp * (1 - kUp) / std::sqrt(kCount));
    }
    ups.push_back(bits);
  }
}

TEST_CASE("stochastic rounding depends on step and position only, not on how tensors are cut or grouped",
          "[fused_adam]") {
  const auto options = with_mode(FusedAdamWOptions(0.01).weight_decay(0.1).seed(9), all_modes()[5]);
  torch::manual_seed(54);
  const Tensor whole = torch::randn({3000}).to(at::kBFloat16).requires_grad_();
  const int64_t cuts[] = {0, 13, 13, 20, 1021, 3000};
  std::vector<Tensor> parts;
  for (int i = 0; i < 5; ++i)
    parts.push_back(whole.detach().slice(0, cuts[i], cuts[i + 1]).clone().requires_grad_());
  FusedAdamW one({whole}, options), many(parts, options);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  auto grouped = clones(parts);
  for (const Tensor& part : grouped) groups.emplace_back(std::vector<Tensor>{part});
  FusedAdamW in_groups(groups, options);
  Tensor first_pattern;
  for (int step = 0; step < 4; ++step) {
    const Tensor gradient = torch::randn({3000}).to(at::kBFloat16);
    whole.mutable_grad() = gradient;
    for (size_t i = 0; i < 5; ++i) {
      parts[i].mutable_grad() = grouped[i].mutable_grad() = gradient.slice(0, cuts[i], cuts[i + 1]);
    }
    if (step == 2) {  // one part sits out; the others draw as before
      whole.mutable_grad() = Tensor();
      parts[0].mutable_grad() = grouped[0].mutable_grad() = Tensor();
      many.step();
      in_groups.step();
      REQUIRE(same_bits(parts, grouped));
      continue;
    }
    one.step();
    many.step();
    in_groups.step();
    REQUIRE(same_bits(parts, grouped));
    if (step < 2) REQUIRE(same_bits(torch::cat(parts), whole));
  }
}

TEST_CASE("a parameter that never had a gradient still has its place in the draws", "[fused_adam]") {
  const auto options = with_mode(FusedAdamWOptions(0.01).seed(9), all_modes()[5]);
  torch::manual_seed(59);
  const Tensor whole = torch::randn({300}).to(at::kBFloat16).requires_grad_();
  whole.mutable_grad() = torch::randn({300}).to(at::kBFloat16);
  const auto part = [&](int64_t begin, int64_t end) {
    const Tensor tensor = whole.detach().slice(0, begin, end).clone().requires_grad_();
    tensor.mutable_grad() = whole.grad().slice(0, begin, end).clone();
    return tensor;
  };
  const Tensor idle = part(0, 13), late = part(13, 300);
  idle.mutable_grad() = Tensor();
  FusedAdamW one({whole}, options), two({idle, late}, options);
  for (int step = 0; step < 2; ++step) {
    one.step();
    two.step();
    CHECK(same_bits(late, whole.slice(0, 13)));
  }
}

TEST_CASE("stochastic rounding draws anew each step", "[fused_adam]") {
  const Tensor parameter = torch::ones({4096}, at::kBFloat16).requires_grad_();
  FusedAdamW optimizer({parameter},
                       with_mode(FusedAdamWOptions(1e-3).weight_decay(0).eps(0).seed(3), all_modes()[5]));
  parameter.mutable_grad() = torch::full({4096}, 0.5, at::kBFloat16);
  std::vector<Tensor> results;
  for (int step = 0; step < 4; ++step) {
    torch::NoGradGuard no_grad;
    parameter.fill_(1);  // the same exact result each time, as the gradient is constant
    optimizer.step();
    const double agreeing = 0.744 * 0.744 + 0.256 * 0.256;  // of independent draws
    for (const Tensor& earlier : results) {
      const double same = parameter.eq(earlier).to(at::kDouble).mean().item<double>();
      CHECK(std::abs(same - agreeing) <= 4 * std::sqrt(agreeing * (1 - agreeing) / 4096));
    }
    results.push_back(parameter.detach().clone());
  }
}

TEST_CASE("small updates are lost to nearest rounding, and add up with a remainder or stochastic rounding",
          "[fused_adam]") {
  for (const Mode& mode : all_modes()) {
    if (mode.dtype != at::kBFloat16) continue;
    CAPTURE(mode.name);
    const Tensor parameter = torch::ones({4096}, at::kBFloat16).requires_grad_();
    FusedAdamW optimizer({parameter}, with_mode(FusedAdamWOptions(1e-4).weight_decay(0).eps(0), mode));
    parameter.mutable_grad() = torch::full({4096}, 0.5, at::kBFloat16);
    for (int step = 0; step < 200; ++step) optimizer.step();
    const double mean = parameter.to(at::kDouble).mean().item<double>();
    const bool loses = mode.master_weights == MasterWeights::none && mode.rounding == Rounding::nearest;
    // Below 1 a correction counts in 127ths of 2^-9; 200 equal updates are rounded to them in the same direction.
    const double rounding = mode.master_weights == MasterWeights::remainder_8 ? 200 * 0x1p-10 / 127 : 0;
    CHECK(std::abs(mean - (loses ? 1.0 : 0.98)) <= 0x1p-9 + rounding);
  }
}

}  // namespace
}  // namespace pacer::testing
