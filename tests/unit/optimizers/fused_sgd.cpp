// FusedSgd against peers that share no code with it: torch::optim::SGD, at::_fused_sgd_, and numbers worked out by hand.
#include "support/catch.h"

#include <ATen/Version.h>
#include <ATen/ops/_fused_sgd.h>

#include "support/optimizers/twins.h"

namespace pacer::testing::fused_sgd {
namespace {

using torch::optim::SGDOptions;

constexpr int kSteps = 200;
constexpr double kRate = 0.01;

struct SgdCase {
  double momentum, dampening, weight_decay;
  bool nesterov, maximize;

  SGDOptions of_torch() const {
    return SGDOptions(kRate)
        .momentum(momentum)
        .dampening(dampening)
        .weight_decay(weight_decay)
        .nesterov(nesterov);
  }
  FusedSgdOptions own() const { return FusedSgdOptions(of_torch()).maximize(maximize); }
  std::string text() const {
    return "momentum " + std::to_string(momentum) + ", dampening " + std::to_string(dampening) + ", decay " +
           std::to_string(weight_decay) + (nesterov ? ", nesterov" : "") + (maximize ? ", maximize" : "");
  }
};

// Every combination that torch takes.
std::vector<SgdCase> sgd_cases() {
  std::vector<SgdCase> cases;
  for (const double momentum : {0.0, 0.5, 0.95}) {
    for (const double dampening : {0.0, 0.3}) {
      for (const double decay : {0.0, 0.1}) {
        for (const bool nesterov : {false, true}) {
          for (const bool maximize : {false, true}) {
            if (nesterov && (momentum == 0 || dampening != 0)) continue;
            cases.push_back({momentum, dampening, decay, nesterov, maximize});
          }
        }
      }
    }
  }
  return cases;
}

// Whether LibTorch's loops have fused multiply-adds, as those here have everywhere.
bool torch_fuses() {
  const std::string capability = at::get_cpu_capability();
  return contains(capability, "AVX2") || contains(capability, "AVX512");
}

// Without them torch rounds the product of an addition by itself. A step then has at most four more roundings, of values below
// 32: gradients of five deviations, sums of 1 / (1 - 0.95) of them times the rate, and a parameter that these move; the error
// of a momentum lives on in the sum by that factor, too.
double sgd_bound(double unit_roundoff) { return torch_fuses() ? 0 : kSteps * 4 * 20 * unit_roundoff * 32; }

// Steps in which one parameter starts late, one sits out now and then, and one has no elements.
double worst_against_torch(const SgdCase& c, at::ScalarType dtype) {
  torch::manual_seed(7);
  const std::vector<Tensor> parameters = random_parameters({{33, 17}, {65}, {3}, {0}, {}}, dtype);
  const std::vector<Tensor> ours = clones(parameters), theirs = clones(parameters);
  FusedSgd optimizer(ours, c.own());
  torch::optim::SGD peer(theirs, c.of_torch());
  double worst = 0;
  for (int step = 0; step < kSteps; ++step) {
    set_random_gradients(ours, theirs);
    for (const size_t i : {size_t{1}, size_t{2}}) {
      if (i == 1 ? step >= 5 : step % 7 != 3) continue;
      ours[i].mutable_grad() = theirs[i].mutable_grad() = Tensor();
    }
    for (const Tensor& p : theirs) {
      if (c.maximize && p.grad().defined())
        p.mutable_grad() = p.grad().neg();  // torch's of C++ has no such option
    }
    if (step == 100) {
      options_of(optimizer).lr(kRate / 4);
      options_of(peer).lr(kRate / 4);
    }
    optimizer.step();
    peer.step();
    worst = std::max(worst, distance(ours, theirs));
  }
  return worst;
}

}  // namespace

TEST_CASE("FusedSgd takes the steps of torch::optim::SGD, to the bit where torch fuses multiply-adds",
          "[fused_sgd]") {
  for (const SgdCase& c : sgd_cases()) {
    CAPTURE(c.text());
    CHECK(worst_against_torch(c, at::kFloat) <= sgd_bound(0x1p-24));
    CHECK(worst_against_torch(c, at::kDouble) <= sgd_bound(0x1p-53));
  }
}

TEST_CASE("the momentum buffer is torch's, from the first gradient of each parameter on", "[fused_sgd]") {
  torch::manual_seed(8);
  Twins<FusedSgd> twins(random_parameters({{40}, {5, 5}}, at::kFloat),
                        SGDOptions(0.1).momentum(0.9).dampening(0.5));
  set_random_gradients(twins.ours, twins.theirs);
  twins.clear_gradient(1);
  twins.step();
  CHECK(same_bits(state_of(twins.optimizer, twins.ours[0]).momentum_buffer(), twins.ours[0].grad()));
  CHECK(twins.optimizer.state().count(twins.ours[1].unsafeGetTensorImpl()) == 0);
  twins.step_with_random_gradients();
  CHECK(same_bits(state_of(twins.optimizer, twins.ours[1]).momentum_buffer(), twins.ours[1].grad()));
  for (int step = 0; step < 5; ++step) twins.step_with_random_gradients();
  for (size_t i = 0; i < 2; ++i) {
    const Tensor& theirs = state_of(twins.peer, twins.theirs[i]).momentum_buffer();
    CHECK(distance(state_of(twins.optimizer, twins.ours[i]).momentum_buffer(), theirs) <= sgd_bound(0x1p-24));
  }
}

TEST_CASE("FusedSgd takes the steps of at::_fused_sgd_", "[fused_sgd]") {
  for (const SgdCase& c : sgd_cases()) {
    CAPTURE(c.text());
    torch::manual_seed(9);
    const std::vector<Tensor> parameters = random_parameters({{33, 17}, {65}}, at::kFloat);
    const std::vector<Tensor> ours = clones(parameters), theirs = clones(parameters);
    FusedSgd optimizer(ours, c.own());
    std::vector<Tensor> buffers, values;
    for (const Tensor& p : theirs) {
      values.push_back(p.detach());
      if (c.momentum > 0) buffers.push_back(torch::zeros_like(p.detach()));
    }
    for (int step = 0; step < kSteps; ++step) {
      set_random_gradients(ours, theirs);
      std::vector<Tensor> gradients;
      for (const Tensor& p : theirs) gradients.push_back(p.grad());
      optimizer.step();
      at::_fused_sgd_(values, gradients, buffers, c.weight_decay, c.momentum, kRate, c.dampening, c.nesterov,
                      c.maximize, /*is_first_step=*/step == 0);
    }
    // Its compiler decides where to fuse, so that at most four values of a step are rounded otherwise.
    CHECK(distance(ours, values) <= kSteps * 4 * 20 * 0x1p-24 * 32);
  }
}

TEST_CASE("SGD worked out by hand: momentum, dampening, decay, Nesterov's momentum and ascent",
          "[fused_sgd]") {
  // p = 2; g = 1, then 3. All numbers are exact in binary.
  const auto after_two = [](const FusedSgdOptions& options) {
    Tensor p = torch::full({1}, 2.0).requires_grad_();
    FusedSgd optimizer({p}, options);
    for (const double g : {1.0, 3.0}) {
      p.mutable_grad() = torch::full({1}, g);
      optimizer.step();
    }
    return p.item<double>();
  };
  CHECK(after_two(FusedSgdOptions(0.5)) == 2 - 0.5 - 1.5);
  CHECK(after_two(FusedSgdOptions(0.5).maximize(true)) == 2 + 0.5 + 1.5);
  CHECK(after_two(FusedSgdOptions(0.5).momentum(0.5)) == 2 - 0.5 - 0.5 * (0.5 + 3));
  CHECK(after_two(FusedSgdOptions(0.5).momentum(0.5).dampening(0.25)) == 2 - 0.5 - 0.5 * (0.5 + 0.75 * 3));
  CHECK(after_two(FusedSgdOptions(0.5).momentum(0.5).nesterov(true)) == 2 - 0.75 - 0.5 * (3 + 0.5 * 3.5));
  // g = 1 + 0.5 * 2 = 2, p = 1, g = 3 + 0.5 * 1
  CHECK(after_two(FusedSgdOptions(0.5).weight_decay(0.5)) == 1 - 0.5 * 3.5);
  // Uphill, decay still pulls to zero: g = -1 + 0.5 * 2 = 0, p = 2, g = -3 + 1
  CHECK(after_two(FusedSgdOptions(0.5).weight_decay(0.5).maximize(true)) == 2 + 0.5 * 2);
}

TEST_CASE("16-bit parameters take the steps of SGD as far as their storage goes", "[fused_sgd]") {
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble || mode.dtype == at::kFloat) continue;
    for (const bool nesterov : {false, true}) {
      CAPTURE(mode.name, nesterov);
      torch::manual_seed(10);
      const std::vector<Tensor> ours = random_parameters({{37, 9}, {70}}, mode.dtype);
      std::vector<Tensor> theirs;
      for (const Tensor& p : ours) theirs.push_back(p.detach().to(at::kDouble).requires_grad_());
      const SGDOptions options = SGDOptions(0.01).momentum(0.9).weight_decay(0.1).nesterov(nesterov);
      FusedSgd optimizer(ours, with_mode(FusedSgdOptions(options), mode));
      torch::optim::SGD peer(theirs, options);
      for (int step = 0; step < 20; ++step) {
        set_random_gradients(ours, theirs, mode.dtype);
        optimizer.step();
        peer.step();
      }
      const bool has_master = mode.master_weights != MasterWeights::none;
      for (size_t i = 0; i < ours.size(); ++i) {
        const auto& state = state_of(optimizer, ours[i]);
        // Parameters stay below 8: half a unit of their last place, or without a master copy one for each step.
        const double unit = mode.dtype == at::kHalf ? 0x1p-9 : 0x1p-6;
        CHECK(distance(ours[i], theirs[i]) <= (has_master ? 1 : 20) * unit * 1.01);
        if (state.master().defined()) CHECK(distance(state.master(), theirs[i]) <= 1e-4);
      }
    }
  }
}

TEST_CASE("stochastic rounding draws other bits in every step without a momentum, too", "[fused_sgd]") {
  // Each step adds half a unit of the last place of 1, so that a fair draw goes up half of the time.
  const Tensor p = torch::ones({4096}, at::kBFloat16).requires_grad_();
  FusedSgd optimizer(
      {p}, FusedSgdOptions(0x1p-8).master_weights(MasterWeights::none).rounding(Rounding::stochastic));
  p.mutable_grad() = torch::full({4096}, -1.0).to(at::kBFloat16);
  for (int step = 0; step < 2; ++step) optimizer.step();
  const Tensor went = p.detach().to(at::kDouble).sub(1).mul(128).round();
  for (const int64_t times : {0, 2}) CHECK(std::abs(count_true(went == times) - 1024) < 200);
}

TEST_CASE("an SGD step does not depend on the number of threads", "[fused_sgd]") {
  std::vector<std::vector<Tensor>> results;
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    torch::manual_seed(11);
    std::vector<Tensor> parameters = random_parameters({{300, 401}, {7}}, at::kFloat);
    FusedSgd optimizer(parameters, FusedSgdOptions(0.1).momentum(0.9).weight_decay(0.1));
    for (int step = 0; step < 3; ++step) {
      set_random_gradients(parameters);
      optimizer.step();
    }
    results.push_back(parameters);
  }
  at::set_num_threads(1);
  CHECK(same_bits(results[0], results[1]));
}

}  // namespace pacer::testing::fused_sgd
