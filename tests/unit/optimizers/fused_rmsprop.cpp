// FusedRmsprop against references that share no code with it: torch::optim::RMSprop, a restatement in fp64 vectors, and numbers
// worked out by hand.
#include "support/catch.h"

#include <cmath>

#include <ATen/Version.h>

#include "support/optimizers/twins.h"

namespace pacer::testing::fused_rmsprop {
namespace {

using torch::optim::RMSpropOptions;

constexpr int kSteps = 200;
constexpr double kRate = 0.01;

struct RmspropCase {
  double alpha, eps, weight_decay, momentum;
  bool centered, maximize;

  RMSpropOptions of_torch() const {
    auto options = RMSpropOptions(kRate).alpha(alpha).eps(eps).weight_decay(weight_decay);
    return options.momentum(momentum).centered(centered);
  }
  FusedRmspropOptions own() const { return FusedRmspropOptions(of_torch()).maximize(maximize); }
  std::string text() const {
    return "alpha " + std::to_string(alpha) + ", eps " + std::to_string(eps) + ", decay " +
           std::to_string(weight_decay) + ", momentum " + std::to_string(momentum) +
           (centered ? ", centered" : "") + (maximize ? ", maximize" : "");
  }
};

std::vector<RmspropCase> rmsprop_cases() {
  std::vector<RmspropCase> cases;
  for (const double alpha : {0.9, 0.99}) {
    for (const double momentum : {0.0, 0.5, 0.95}) {
      for (const double decay : {0.0, 0.1}) {
        for (const bool centered : {false, true}) {
          for (const bool maximize : {false, true}) {
            cases.push_back({alpha, maximize ? 1e-8 : 0.1, decay, momentum, centered, maximize});
          }
        }
      }
    }
  }
  return cases;
}

// The rule as its papers have it, element by element. It keeps the largest values there were, which bounds need.
class Restatement {
 public:
  Restatement(const RmspropCase& of, std::vector<double> parameter)
      : p(std::move(parameter)), of_(of), v_(p.size()), a_(p.size()), m_(p.size()) {}

  void step(double lr, const std::vector<double>& gradient) {
    for (size_t k = 0; k < p.size(); ++k) {
      const double g = (of_.maximize ? -gradient[k] : gradient[k]) + of_.weight_decay * p[k];
      v_[k] += (1 - of_.alpha) * (g * g - v_[k]);
      a_[k] += (1 - of_.alpha) * (g - a_[k]);
      const double variance = of_.centered ? v_[k] - a_[k] * a_[k] : v_[k];
      const double direction = g / (std::sqrt(variance) + of_.eps);
      m_[k] = of_.momentum * m_[k] + direction;
      p[k] -= lr * m_[k];
      direction_ = std::max(direction_, std::abs(direction));
      momentum_ = std::max(momentum_, std::abs(m_[k]));
      parameter_ = std::max(parameter_, std::abs(p[k]));
      cancelled_ = std::max(cancelled_, v_[k] / variance);
    }
  }

  // How far parameters may be from each other after all steps, where means are apart by `of_mean` units of their last place. The
  // root halves that, and what the centered form cancels multiplies it. Root, sum and quotient round, torch's root by up to two
  // units, and so do the momentum and the parameter, in which errors of directions add up.
  double bound(double unit, double of_mean) const {
    const double of_direction = (of_mean / 2 * cancelled_ + 6) * direction_ + 4 * momentum_;
    return kSteps * unit * (2 * parameter_ + kRate * of_direction / (1 - of_.momentum));
  }
  // A mean gets at most four errors of a unit in each step, and keeps alpha of the former ones.
  double bound(double unit) const { return bound(unit, 4 / (1 - of_.alpha)); }

  std::vector<double> p;

 private:
  RmspropCase of_;
  std::vector<double> v_, a_, m_;
  double direction_ = 0, momentum_ = 0, parameter_ = 0, cancelled_ = 1;
};

// Whether LibTorch's loops have fused multiply-adds, as those here have everywhere.
bool torch_fuses() {
  const std::string capability = at::get_cpu_capability();
  return contains(capability, "AVX2") || contains(capability, "AVX512");
}

struct Distances {
  double to_torch = 0, to_restatement = 0, bound = 0, bound_of_same_means = 0;
  bool has_same_means = true;
};

// Steps in which one parameter starts late, one sits out now and then, and one has no elements.
Distances distances_of(const RmspropCase& c, at::ScalarType dtype) {
  torch::manual_seed(7);
  const std::vector<Tensor> parameters = random_parameters({{33, 17}, {65}, {3}, {0}, {}}, dtype);
  const std::vector<Tensor> ours = clones(parameters), theirs = clones(parameters);
  std::vector<Restatement> restated;
  for (const Tensor& p : parameters) restated.emplace_back(c, to_doubles(p));
  FusedRmsprop optimizer(ours, c.own());
  torch::optim::RMSprop peer(theirs, c.of_torch());
  Distances worst;
  for (int step = 0; step < kSteps; ++step) {
    set_random_gradients(ours, theirs);
    const double lr = step < 100 ? kRate : kRate / 4;
    options_of(optimizer).lr(lr);
    options_of(peer).lr(lr);
    for (size_t i = 0; i < ours.size(); ++i) {
      if ((i == 1 && step < 5) || (i == 2 && step % 7 == 3)) {
        ours[i].mutable_grad() = theirs[i].mutable_grad() = Tensor();
        continue;
      }
      restated[i].step(lr, to_doubles(ours[i].grad()));
      if (c.maximize) theirs[i].mutable_grad() = theirs[i].grad().neg();  // torch's of C++ has no such option
    }
    optimizer.step();
    peer.step();
    worst.to_torch = std::max(worst.to_torch, distance(ours, theirs));
    for (size_t i = 0; i < ours.size(); ++i) {
      const std::vector<double> values = to_doubles(ours[i]);
      for (size_t k = 0; k < values.size(); ++k) {
        worst.to_restatement = std::max(worst.to_restatement, std::abs(values[k] - restated[i].p[k]));
      }
    }
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    const double unit = dtype == at::kFloat ? 0x1p-24 : 0x1p-53;
    worst.bound = std::max(worst.bound, restated[i].bound(unit));
    worst.bound_of_same_means = std::max(worst.bound_of_same_means, restated[i].bound(unit, 0));
    const auto& own = state_of(optimizer, ours[i]);
    const auto& torchs = state_of(peer, theirs[i]);
    worst.has_same_means = worst.has_same_means && same_bits(own.square_avg(), torchs.square_avg()) &&
                           same_bits(own.grad_avg(), torchs.grad_avg());
  }
  return worst;
}

// What two steps with gradients g1 and g2 make of 2.
double after_two(const FusedRmspropOptions& options, double g1, double g2) {
  Tensor p = torch::full({1}, 2.0).requires_grad_();
  FusedRmsprop optimizer({p}, options);
  for (const double g : {g1, g2}) {
    p.mutable_grad() = torch::full({1}, g);
    optimizer.step();
  }
  return p.item<double>();
}

}  // namespace

TEST_CASE("FusedRmsprop takes the steps of torch::optim::RMSprop and of a restatement", "[fused_rmsprop]") {
  for (const RmspropCase& c : rmsprop_cases()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const Distances found = distances_of(c, dtype);
      CAPTURE(c.text(), dtype, found.to_torch, found.to_restatement, found.bound, found.bound_of_same_means);
      CHECK(found.to_restatement <= found.bound);
      CHECK(found.bound <= (dtype == at::kFloat ? 1e-2 : 2e-11));  // so that it goes on to say something
      // Decay brings what steps differ by into the next gradients; without it the means are those of torch, to the bit.
      const bool same_means = torch_fuses() && c.weight_decay == 0;
      CHECK((found.has_same_means || !same_means));
      CHECK(found.to_torch <= (same_means ? found.bound_of_same_means : 2 * found.bound));
    }
  }
}

TEST_CASE("the state of FusedRmsprop is torch's", "[fused_rmsprop]") {
  torch::manual_seed(8);
  Twins<FusedRmsprop> twins(random_parameters({{40}, {5, 5}}, at::kDouble),
                            RMSpropOptions(0.1).alpha(0.9).momentum(0.9).centered(true));
  for (int step = 0; step < 6; ++step) {
    set_random_gradients(twins.ours, twins.theirs);
    if (step == 0) twins.clear_gradient(1);
    twins.step();
    CHECK(twins.optimizer.state().count(twins.ours[1].unsafeGetTensorImpl()) == (step > 0));
  }
  for (size_t i = 0; i < 2; ++i) {
    const auto& ours = state_of(twins.optimizer, twins.ours[i]);
    const auto& theirs = state_of(twins.peer, twins.theirs[i]);
    CHECK(ours.step() == theirs.step());
    CHECK(distance(ours.square_avg(), theirs.square_avg()) <= 1e-14);
    CHECK(distance(ours.grad_avg(), theirs.grad_avg()) <= 1e-14);
    CHECK(distance(ours.momentum_buffer(), theirs.momentum_buffer()) <= 1e-12);
  }
}

TEST_CASE("RMSprop worked out by hand: eps, momentum, decay, the centered form and ascent",
          "[fused_rmsprop]") {
  // All numbers are exact in binary: the mean of squares is 4 after a gradient of 4, and 3 + 1 after one of 2.
  const auto options = FusedRmspropOptions(0.5).alpha(0.75).eps(2);
  using Options = FusedRmspropOptions;
  CHECK(after_two(options, 4, 2) == 2 - 0.5 * 4 / 4 - 0.5 * 2 / 4);
  CHECK(after_two(Options(options).maximize(true), 4, 2) == 2 + 0.5 * 4 / 4 + 0.5 * 2 / 4);
  CHECK(after_two(Options(options).momentum(0.5), 4, 2) == 2 - 0.5 * 1 - 0.5 * (0.5 + 0.5));
  // The gradients are 3 + 0.5 * 2 and 1.25 + 0.5 * 1.5; uphill, decay still pulls to zero.
  CHECK(after_two(Options(options).weight_decay(0.5), 3, 1.25) == 2 - 0.5 * 1 - 0.5 * 0.5);
  CHECK(after_two(Options(options).weight_decay(0.5).maximize(true), -3, -1.25) == 2 - 0.5 * 1 - 0.5 * 0.5);
  // The variance is 8 - 4 after a gradient of 4, and 8.5 - 6.25 after one of 3.
  const auto centered = FusedRmspropOptions(0.25).alpha(0.5).eps(0).centered(true);
  CHECK(after_two(centered, 4, 3) == 2 - 0.25 * 4 / 2 - 0.25 * 3 / 1.5);
  CHECK(after_two(Options(centered).momentum(0.5), 4, 3) == 2 - 0.25 * 2 - 0.25 * (1 + 2));
}

TEST_CASE("a variance that rounding makes negative counts as zero", "[fused_rmsprop]") {
  // Gradients that do not change have none.
  torch::manual_seed(9);
  const Tensor gradient = torch::randn({4096}), p = torch::zeros({4096}).requires_grad_();
  FusedRmsprop optimizer({p}, FusedRmspropOptions(0x1p-10).alpha(0.5).eps(1).centered(true));
  for (int step = 0; step < 60; ++step) {
    p.mutable_grad() = gradient.clone();
    optimizer.step();
  }
  const auto& state = state_of(optimizer, p);
  const Tensor variance = state.square_avg().to(at::kDouble) - state.grad_avg().to(at::kDouble).square();
  CHECK(count_true(variance < 0) > 0);
  const Tensor before = p.detach().clone();
  p.mutable_grad() = gradient.clone();
  optimizer.step();
  // The denominator is eps then, but for roots of a few units of the last place.
  CHECK(distance(p.detach() - before, -gradient * 0x1p-10) <= 0x1p-10 * 5 * 0x1p-10);
}

TEST_CASE("16-bit parameters take the steps of RMSprop as far as their storage goes", "[fused_rmsprop]") {
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble || mode.dtype == at::kFloat) continue;
    for (const bool centered : {false, true}) {
      CAPTURE(mode.name, centered);
      torch::manual_seed(10);
      const std::vector<Tensor> ours = random_parameters({{37, 9}, {70}}, mode.dtype);
      std::vector<Tensor> theirs;
      for (const Tensor& p : ours) theirs.push_back(p.detach().to(at::kDouble).requires_grad_());
      const auto options = RMSpropOptions(0.002).alpha(0.9).eps(0.1).momentum(0.5).centered(centered);
      FusedRmsprop optimizer(ours, with_mode(FusedRmspropOptions(options), mode));
      torch::optim::RMSprop peer(theirs, options);
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

}  // namespace pacer::testing::fused_rmsprop
