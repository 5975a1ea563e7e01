// FusedLamb on the CPU against the rule restated in double precision, and where the rule has a closed form
// against that.
#include "support/catch.h"

#include "support/kernels/lamb.h"

namespace pacer::testing::lamb {
namespace {

// Options that differ in every field, the bounds of the ratio binding or not.
std::vector<FusedLambOptions> all_kinds_of_options() {
  std::vector<FusedLambOptions> kinds;
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool bias_correction : {true, false}) {
      for (const bool adapt : {true, false}) {
        kinds.push_back(FusedLambOptions(0.02)
                            .betas({0.8, 0.95})
                            .eps(1e-3)
                            .weight_decay(weight_decay)
                            .bias_correction(bias_correction)
                            .adapt(adapt));
      }
    }
  }
  kinds.push_back(FusedLambOptions(0.02).min_coeff(3).max_coeff(4));
  kinds.push_back(FusedLambOptions(0.02).min_coeff(0).max_coeff(0.25));
  kinds.push_back(FusedLambOptions(0.02).min_coeff(0.5).max_coeff(0.5));
  return kinds;
}

// A parameter of every kind of size, its fp64 restatement beside it.
struct Restated {
  std::vector<Tensor> parameters;
  std::vector<ReferenceLamb> references;

  Restated(at::ScalarType dtype, const FusedLambOptions& options) {
    parameters = random_parameters({{40, 30}, {7}, {}, {1}, {0, 3}, {70001}}, dtype);
    for (const Tensor& parameter : parameters)
      references.emplace_back(rule_of(options), to_doubles(parameter));
  }
  void step(FusedLamb& optimizer) {
    set_random_gradients(parameters);
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].grad().defined()) references[i].step(to_doubles(parameters[i].grad()));
    }
    optimizer.step();
  }
  // The largest distance of parameter i from the restatement.
  double apart(size_t i) const {
    const std::vector<double> values = to_doubles(parameters[i]);
    double largest = 0;
    for (size_t k = 0; k < values.size(); ++k) {
      const double difference = std::abs(values[k] - references[i].parameter[k]);
      largest = difference <= largest ? largest : difference;
    }
    return largest;
  }
};

}  // namespace

TEST_CASE("FusedLamb takes the steps of the paper's rule, in fp64 and in fp32", "[fused_lamb]") {
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    for (const FusedLambOptions& options : all_kinds_of_options()) {
      CAPTURE(dtype, options.weight_decay(), options.bias_correction(), options.adapt(), options.min_coeff());
      torch::manual_seed(1);
      Restated twin(dtype, options);
      FusedLamb optimizer(twin.parameters, options);
      for (int step = 0; step < 8; ++step) {
        twin.step(optimizer);
        for (size_t i = 0; i < twin.parameters.size(); ++i) {
          CAPTURE(step, i);
          CHECK(twin.apart(i) <= (dtype == at::kDouble ? 1e-13 : 2e-5));
          CHECK(optimizer.trust_ratio(twin.parameters[i]) ==
                Catch::Approx(twin.references[i].ratio).epsilon(dtype == at::kDouble ? 1e-12 : 1e-5));
        }
      }
    }
  }
}

TEST_CASE("a parameter moves by lr times its own norm, whatever the size of the gradient", "[fused_lamb]") {
  torch::manual_seed(2);
  for (const double scale : {1e-4, 1.0, 1e6}) {
    const auto parameters = random_parameters({{300}, {20, 5}}, at::kDouble);
    FusedLamb optimizer(parameters, FusedLambOptions(0.01).weight_decay(0).eps(1e-12));
    for (int step = 0; step < 3; ++step) {
      const auto before = clones(parameters);
      set_random_gradients(parameters);
      for (const Tensor& p : parameters) p.mutable_grad().mul_(scale);
      optimizer.step();
      for (size_t i = 0; i < parameters.size(); ++i) {
        const double moved = norm_of(parameters[i].detach() - before[i].detach());
        CHECK(moved == Catch::Approx(0.01 * norm_of(before[i])).epsilon(1e-10));
      }
    }
  }
}

TEST_CASE("min_coeff and max_coeff bound the trust ratio", "[fused_lamb]") {
  // One step from zero moments: every element of u is the sign of its gradient, so |u| = sqrt(n).
  const auto moved_by = [](double magnitude, const FusedLambOptions& options) {
    const Tensor p = torch::full({16}, magnitude, at::kDouble).requires_grad_();
    p.mutable_grad() = torch::full({16}, 3.0, at::kDouble);
    FusedLamb optimizer({p}, options);
    optimizer.step();
    CHECK(norm_of(p - magnitude) == Catch::Approx(4 * 0.125 * optimizer.trust_ratio(p)).epsilon(1e-12));
    return optimizer.trust_ratio(p);
  };
  const FusedLambOptions plain = FusedLambOptions(0.125).weight_decay(0).eps(0);
  const auto bounded = [&](double low, double high) {
    return FusedLambOptions(plain).min_coeff(low).max_coeff(high);
  };
  CHECK(moved_by(0.5, plain) == Catch::Approx(0.5).epsilon(1e-12));
  CHECK(moved_by(1e-3, plain) == 0.01);
  CHECK(moved_by(1e3, plain) == 10.0);
  CHECK(moved_by(0.5, bounded(0.75, 2)) == 0.75);
  CHECK(moved_by(0.5, bounded(0.0625, 0.25)) == 0.25);
  CHECK(moved_by(0.5, bounded(0.25, 0.75)) == Catch::Approx(0.5).epsilon(1e-12));
  CHECK(moved_by(0.5, bounded(0, 0)) == 0.0);
}

TEST_CASE("without adaptation a step is Adam's with decay taken at the end", "[fused_lamb]") {
  torch::manual_seed(3);
  for (const double weight_decay : {0.0, 0.1}) {
    const auto ours = random_parameters({{30, 5}, {7}}, at::kDouble), theirs = clones(ours);
    FusedLamb lamb(ours, FusedLambOptions(0.01).eps(1e-8).weight_decay(weight_decay).adapt(false));
    torch::optim::Adam adam(theirs, torch::optim::AdamOptions(0.01));
    for (int step = 0; step < 5; ++step) {
      set_random_gradients(ours, theirs);
      const auto before = clones(theirs);
      lamb.step();
      adam.step();
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < theirs.size(); ++i) theirs[i].sub_(before[i], 0.01 * weight_decay);
      CHECK(distance(ours, theirs) <= 1e-14);
      CHECK(lamb.trust_ratio(ours[0]) == 1);
    }
  }
}

TEST_CASE("a parameter of zeros and an update of zeros have ratio 1", "[fused_lamb]") {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    CAPTURE(dtype);
    const auto options = FusedLambOptions(0.125).weight_decay(0).eps(0.0).min_coeff(2).max_coeff(3);
    const Tensor zeros = torch::zeros({40}, dtype).requires_grad_();
    const Tensor still = torch::full({40}, 0.5, dtype).requires_grad_();
    const Tensor empty = torch::zeros({0}, dtype).requires_grad_();
    zeros.mutable_grad() = torch::full({40}, 2.0, dtype);
    still.mutable_grad() = torch::zeros({40}, dtype);
    empty.mutable_grad() = torch::zeros({0}, dtype);
    FusedLamb optimizer({zeros, still, empty}, FusedLambOptions(options).eps(1e-6));
    optimizer.step();
    CHECK(to_doubles(zeros)[39] == Catch::Approx(-0.125).epsilon(1e-2));
    CHECK(to_doubles(still) == std::vector<double>(40, 0.5));
    for (const Tensor& p : {zeros, still, empty}) CHECK(optimizer.trust_ratio(p) == 1);
    // Away from zero the bounds count again.
    optimizer.step();
    CHECK(optimizer.trust_ratio(zeros) == 2);
    CHECK(optimizer.trust_ratio(still) == 1);
  }
}

TEST_CASE("weight decay is part of the update that the ratio scales", "[fused_lamb]") {
  // Without a gradient's direction u = weight_decay * p, so r = 1 / weight_decay and p shrinks by lr.
  const Tensor p = torch::full({9}, 2.0, at::kDouble).requires_grad_();
  p.mutable_grad() = torch::zeros({9}, at::kDouble);
  FusedLamb optimizer({p}, FusedLambOptions(0.25).weight_decay(0.5));
  optimizer.step();
  CHECK(optimizer.trust_ratio(p) == Catch::Approx(2).epsilon(1e-14));
  CHECK(distance(p, torch::full({9}, 1.5, at::kDouble)) <= 1e-14);
  options_of(optimizer).max_coeff(1);
  optimizer.step();
  CHECK(distance(p, torch::full({9}, 1.5 * (1 - 0.125), at::kDouble)) <= 1e-14);
}

TEST_CASE("groups have their own adaptation, bounds, rate and decay", "[fused_lamb]") {
  torch::manual_seed(4);
  const auto parameters = random_parameters({{50}, {60}, {70}}, at::kDouble);
  const std::vector<FusedLambOptions> options = {FusedLambOptions(0.01),
                                                 FusedLambOptions(0.5).adapt(false).weight_decay(0),
                                                 FusedLambOptions(0.02).max_coeff(0.3).betas({0.5, 0.5})};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  std::vector<ReferenceLamb> references;
  for (size_t g = 0; g < 3; ++g) {
    groups.emplace_back(std::vector<Tensor>{parameters[g]}, std::make_unique<FusedLambOptions>(options[g]));
    references.emplace_back(rule_of(options[g]), to_doubles(parameters[g]));
  }
  FusedLamb optimizer(groups);
  for (int step = 0; step < 4; ++step) {
    set_random_gradients(parameters);
    if (step == 2) parameters[0].mutable_grad() = Tensor();  // frozen for a step
    for (size_t g = 0; g < 3; ++g) {
      if (parameters[g].grad().defined()) references[g].step(to_doubles(parameters[g].grad()));
    }
    optimizer.step();
    for (size_t g = 0; g < 3; ++g) {
      CHECK(distance(parameters[g], torch::tensor(references[g].parameter, at::kDouble)) <= 1e-13);
      CHECK(optimizer.trust_ratio(parameters[g]) == Catch::Approx(references[g].ratio).epsilon(1e-12));
    }
  }
  CHECK(state_of(optimizer, parameters[0]).step() == 3);
  CHECK(state_of(optimizer, parameters[1]).step() == 4);
}

TEST_CASE("16-bit parameters follow the fp64 rule as far as their storage goes", "[fused_lamb]") {
  const auto options = FusedLambOptions(0.02).weight_decay(0.1);
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble || mode.dtype == at::kFloat) continue;
    CAPTURE(mode.name);
    torch::manual_seed(5);
    Restated twin(mode.dtype, options);
    FusedLamb optimizer(twin.parameters, with_mode(options, mode));
    const int kSteps = 5;
    for (int step = 0; step < kSteps; ++step) twin.step(optimizer);
    const bool exact_inside = mode.master_weights != MasterWeights::none;
    const double unit = mode.dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
    for (size_t i = 0; i < twin.parameters.size(); ++i) {
      CAPTURE(i);
      // Values are below 8; rounded once, or in each step (and with them the moments of "bf16 to nearest").
      CHECK(twin.apart(i) <= 8 * unit * (exact_inside ? 0.51 : kSteps));
      CHECK(optimizer.trust_ratio(twin.parameters[i]) ==
            Catch::Approx(twin.references[i].ratio).epsilon(exact_inside ? 1e-4 : 0.05));
      if (mode.master_weights == MasterWeights::fp32) {
        const auto& master = state_of(optimizer, twin.parameters[i]).master();
        CHECK(distance(master.flatten(), torch::tensor(twin.references[i].parameter, at::kDouble)) <= 2e-5);
      }
    }
  }
}

TEST_CASE("a LAMB step does not depend on the number of threads", "[fused_lamb]") {
  const int threads = at::get_num_threads();
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(6);
    const auto values = random_parameters({{200001}, {5}, {300, 300}, {}}, mode.dtype);
    std::vector<Tensor> first;
    for (const int count : {1, 2, 3}) {
      at::set_num_threads(count);
      const auto parameters = clones(values);
      FusedLamb optimizer(parameters, with_mode(FusedLambOptions(0.1).seed(9), mode));
      torch::manual_seed(7);
      for (int step = 0; step < 2; ++step) {
        set_random_gradients(parameters);
        optimizer.step();
      }
      if (first.empty()) first = parameters;
      CHECK(same_bits(first, parameters));
    }
  }
  at::set_num_threads(threads);
}

TEST_CASE("parameters with gaps and gradients in another order are stepped like dense ones", "[fused_lamb]") {
  torch::manual_seed(8);
  const auto dense = random_parameters({{6, 4}, {5, 7}}, at::kDouble);
  const Tensor gaps = torch::randn({6, 8}, at::kDouble).slice(1, 0, 8, 2).detach();
  gaps.copy_(dense[0].detach());
  const std::vector<Tensor> odd = {gaps.requires_grad_(), dense[1].detach().clone().requires_grad_()};
  FusedLamb of_dense(dense, FusedLambOptions(0.1)), of_odd(odd, FusedLambOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    set_random_gradients(dense, odd);
    odd[1].mutable_grad() = odd[1].grad().t().contiguous().t();
    of_dense.step();
    of_odd.step();
  }
  CHECK(distance(dense, odd) <= 1e-15);
  CHECK_FALSE(odd[0].is_non_overlapping_and_dense());
}

}  // namespace pacer::testing::lamb
