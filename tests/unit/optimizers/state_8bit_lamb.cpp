// FusedLamb with state_bits(8) against the rule in fp64, known answers, and how far a training goes from one in 32 bits.
#include "support/catch.h"

#include "support/kernels/lamb.h"
#include "support/optimizers/state_8bit.h"

namespace pacer::testing {
namespace {

using LambRun = StateRun<FusedLamb>;

FusedLambOptions lamb_in_8_bits(double lr = 0.02) {
  return FusedLambOptions(lr).betas({0.9, 0.99}).weight_decay(0.1).state_bits(8);
}

struct Moments {
  Tensor m, v;  // fp64
};
Moments moments_of(LambRun& run, size_t i) {
  auto& state = run.state(i);
  return {decoded_moment(state.exp_avg(), state.exp_avg_scale(), false),
          decoded_moment(state.exp_avg_sq(), state.exp_avg_sq_scale(), true)};
}
// The scale of each element's group.
Tensor scale_of_each(const Tensor& scales, const Tensor& like) {
  return scales.to(at::kDouble).repeat_interleave(32).slice(0, 0, like.numel()).view(like.sizes());
}

}  // namespace

// One step at a time from the state that is stored. Codes of the first moment are coarsest near the scale, 1/127 of it
// apart, so that half of that is what rounding costs; roots of the second are 1/255 of their scale apart, and the
// smallest go up to the first code. The scale is off by 2^-11 of itself. From what the codes say on, all is fp32: a
// handful of roundings in u, 27 in a sum of squares, half of which reach the norm.
TEST_CASE("LAMB in 8 bits stores the moments of the rule and takes the step of what it stored",
          "[fused_lamb][adam8]") {
  auto values = random_parameters(kStateShapes, at::kFloat);
  values.push_back(torch::randn({300, 300}).requires_grad_());
  for (const bool adapts : {true, false}) {
    const auto options = lamb_in_8_bits().adapt(adapts);
    LambRun run(values, options);
    run.step(1, 1);
    for (int step = 2; step <= 6; ++step) {
      std::vector<Moments> before;
      std::vector<Tensor> p, g;
      set_random_gradients(run.parameters);
      for (size_t i = 0; i < values.size(); ++i) {
        before.push_back(moments_of(run, i));
        p.push_back(run.parameters[i].detach().to(at::kDouble));
        g.push_back(run.parameters[i].grad().to(at::kDouble));
      }
      run.optimizer.step();
      for (size_t i = 0; i < values.size(); ++i) {
        INFO("step " << step << ", parameter " << i);
        const Tensor m = 0.9 * before[i].m + 0.1 * g[i], v = 0.99 * before[i].v + 0.01 * g[i].square();
        const Moments after = moments_of(run, i);
        const Tensor of_m = scale_of_each(run.state(i).exp_avg_scale(), m);
        const Tensor of_s = scale_of_each(run.state(i).exp_avg_sq_scale(), v);
        CHECK(count_true((after.m - m).abs() > of_m * (0.5 / 127 * 2 + 0x1p-11 + 1e-6)) == 0);
        CHECK(count_true((after.v.sqrt() - v.sqrt()).abs() > of_s * (1.0 / 255 + 0x1p-11 + 1e-6)) == 0);

        const double c1 = 1 - std::pow(0.9, step), c2 = 1 - std::pow(0.99, step);
        const Tensor u = after.m / c1 / ((after.v / c2).sqrt() + options.eps()) + 0.1 * p[i];
        const double of_p = p[i].norm().item<double>(), of_u = u.norm().item<double>();
        const double ratio = adapts && of_p > 0 && of_u > 0 ? std::min(std::max(of_p / of_u, 0.01), 10.0) : 1;
        CHECK(std::abs(run.optimizer.trust_ratio(run.parameters[i]) - ratio) <= 3e-6 * ratio);
        const Tensor off = (run.parameters[i].detach().to(at::kDouble) - (p[i] - 0.02 * ratio * u)).abs();
        CHECK(count_true(off > 1.2e-7 * p[i].abs() + 0.02 * ratio * 5e-6 * (u.abs() + p[i].abs())) == 0);
      }
    }
  }
}

// All moments of the tensor are their groups' largest, and powers of two, which codes keep.
TEST_CASE("a LAMB step in 8 bits whose moments have codes of their own is that in 32",
          "[fused_lamb][adam8]") {
  const Tensor sign = torch::tensor({1.0f, -1.0f}).repeat({20});
  const auto options = FusedLambOptions(0.25).betas({0.5, 0.75}).eps(0).weight_decay(0).state_bits(8);
  LambRun run({torch::full({40}, 2.0f).requires_grad_()}, options);
  run.parameters[0].mutable_grad() = sign.clone();
  run.optimizer.step();
  // m = .5 g and v = .25 g^2, corrected by .5 and .25: u = g, of norm sqrt(40) beside 2 sqrt(40).
  CHECK(run.optimizer.trust_ratio(run.parameters[0]) == Catch::Approx(2));
  CHECK(distance(run.parameters[0], 2 - 0.5 * sign) < 1e-6);
  CHECK(run.state().exp_avg().equal((127 * sign).to(at::kChar)));
  CHECK(run.state().exp_avg_sq().equal(torch::full({40}, 255, at::kByte)));
  CHECK(count_true(run.state().exp_avg_scale() != 0.5) == 0);
}

TEST_CASE("zero gradients leave zero moments, and decay alone", "[fused_lamb][adam8]") {
  LambRun run({torch::full({33}, 3.0f).requires_grad_()}, lamb_in_8_bits().eps(0).max_coeff(4));
  for (int step = 0; step < 3; ++step) {
    run.parameters[0].mutable_grad() = torch::zeros({33});
    run.optimizer.step();
    CHECK(run.optimizer.trust_ratio(run.parameters[0]) == 4);  // 1 / weight_decay is beyond
  }
  CHECK(distance(run.parameters[0], torch::full({33}, 3 * std::pow(1 - 0.02 * 4 * 0.1, 3))) < 1e-6);
  CHECK(count_true(run.state().exp_avg_sq() != 0) + count_true(run.state().exp_avg() != 0) == 0);
  CHECK(count_true(run.state().exp_avg_scale() != 0) == 0);
}

// As for AdamW (state_8bit.cpp). A second moment that is some steps old moves by less than half a code in a step, so that
// it is the mean of fewer squares than in 32 bits. Its update is a few tenths longer, which the trust ratio takes back.
TEST_CASE("200 LAMB steps in 8 bits end where those in 32 bits do", "[fused_lamb][adam8]") {
  torch::manual_seed(7);
  const Tensor target = torch::randn({96, 80}), noise_of = torch::rand({96, 80}).mul(3).exp();
  const auto loss_after = [&](int64_t bits) {
    LambRun run({torch::full({96, 80}, 0.5).requires_grad_()},
                FusedLambOptions(0.03).weight_decay(0).state_bits(bits));
    torch::manual_seed(11);
    Tensor mean = torch::zeros_like(target);
    for (int step = 0; step < 200; ++step) {
      const Tensor& p = run.parameters[0];
      p.mutable_grad() = (p.detach() - target + torch::randn_like(target).mul(0.3)) * noise_of;
      run.optimizer.step();
      if (step >= 100) mean += run.parameters[0].detach() / 100;
    }
    return std::make_tuple((mean - target).square().mean().sqrt().item<double>(),
                           run.parameters[0].detach().clone(), run.optimizer.trust_ratio(run.parameters[0]));
  };
  const auto [wide, wide_values, ratio] = loss_after(32);
  const auto [narrow, narrow_values, other_ratio] = loss_after(8);
  INFO("from the target: " << wide << " and " << narrow << ", from each other "
                           << (wide_values - narrow_values).square().mean().sqrt().item<double>()
                           << ", ratios " << ratio << " and " << other_ratio);
  CHECK(narrow < 1.02 * wide);
  CHECK(other_ratio == Catch::Approx(ratio).epsilon(0.3));
  // A step is the rate times the ratio, times an update whose elements are below 1 by and large.
  CHECK((wide_values - narrow_values).square().mean().sqrt().item<double>() < 0.7 * 0.03 * ratio);
}

TEST_CASE("a group of LAMB in 8 bits leaves the groups in 32 bits to the bit as they are",
          "[fused_lamb][adam8]") {
  const auto values = random_parameters({{40, 30}, {70}, {33}}, at::kFloat);
  const auto in_32_bits = FusedLambOptions(lamb_in_8_bits()).state_bits(32);
  LambRun wide(values, in_32_bits), narrow(values, lamb_in_8_bits());
  const auto mixed_values = clones(values);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{mixed_values[0], mixed_values[2]},
                      std::make_unique<FusedLambOptions>(lamb_in_8_bits()));
  groups.emplace_back(std::vector<Tensor>{mixed_values[1]}, std::make_unique<FusedLambOptions>(in_32_bits));
  FusedLamb mixed(groups, in_32_bits);
  for (int step = 0; step < 4; ++step) {
    set_random_gradients(wide.parameters, narrow.parameters);
    for (size_t i = 0; i < values.size(); ++i)
      mixed_values[i].mutable_grad() = wide.parameters[i].grad().clone();
    if (step == 2) {  // one that sits the step out
      wide.parameters[2].mutable_grad() = Tensor();
      narrow.parameters[2].mutable_grad() = Tensor();
      mixed_values[2].mutable_grad() = Tensor();
    }
    wide.optimizer.step(), narrow.optimizer.step(), mixed.step();
  }
  CHECK(same_bits(mixed_values[0], narrow.parameters[0]));
  CHECK(same_bits(mixed_values[1], wide.parameters[1]));
  CHECK(same_bits(mixed_values[2], narrow.parameters[2]));
  CHECK(state_of(mixed, mixed_values[2]).step() == 3);
}

TEST_CASE("a gradient that is not finite stays in its group of moments, and shows in all of its tensor",
          "[fused_lamb][adam8]") {
  for (const bool is_checked : {true, false}) {
    LambRun run(random_parameters({{100}, {50}}, at::kFloat), lamb_in_8_bits().finite_check(is_checked));
    run.step(2, 1);
    const auto before = snapshot(run.optimizer);
    run.parameters[0].grad()[40] = std::numeric_limits<float>::infinity();
    run.optimizer.step();
    auto after = snapshot(run.optimizer);
    for (size_t i = 0; i < 2; ++i) after.parameters[i].gradient = before.parameters[i].gradient;
    CHECK(difference(before, after).empty() == is_checked);
    CHECK(count_true(run.parameters[0].isnan()) == (is_checked ? 0 : 100));
    CHECK(count_true(run.parameters[1].isnan()) == 0);
    CHECK(count_true(run.state().exp_avg_scale().isnan()) == (is_checked ? 0 : 1));
    CHECK(run.state().exp_avg_scale()[1].isnan().item<bool>() == !is_checked);
  }
}

TEST_CASE("what LAMB does not have in 8 bits it refuses in a sentence", "[fused_lamb][adam8]") {
  const auto p = random_parameters({{4, 4}}, at::kFloat);
  const auto says = [](const auto& make, const std::string& part) { return contains(refusal(make), part); };
  CHECK(says([&] { FusedLamb(p, FusedLambOptions().state_bits(16)); }, "state_bits must be 8 or 32, not 16"));
  LambRun wide(random_parameters({{4, 4}}, at::kDouble), lamb_in_8_bits());
  CHECK(contains(refusal([&] { wide.step(1, 1); }), "is fp64"));
}

}  // namespace pacer::testing
