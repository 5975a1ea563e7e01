// How far one Adam step may be from the exact one. The rule is restated once, in arithmetic
// that carries a proven bound of its rounding errors (support/carried_error.h); every
// result of the kernel must lie within that bound, and within 4 units for the moments and 5
// for the parameter, for random hyperparameters, sizes and values of any magnitude.
//
// One unit is the effect of one ULP of the largest term of any one sum, product, quotient
// or root on the way, carried to the result: m and the l2 gradient are sums that may
// cancel, so an ULP of the result would say nothing. A rounding costs at most half a unit,
// that of a fused sum one (it may be in the next binade), that of a constant one. Hence
//   m  factor 1, product 1/2, 1 - beta1 1, product 1/2, beta1 1, fused sum 1: at most 5 units
//   v  factor 1, product 1/2, 1 - beta2 1, two products 1/2, beta2 1, fused sum 1: at most 5.5
//   p  those of m and v, root 1/2, 1 / sqrt(c2) 1, epsilon 1, fused sum 1, quotient 1/2, step size 1,
//      decay 1, two fused sums 1: at most 18.5 (l2 decay: 2 more in m and in v)
// if all were as large as possible and of one sign. They are not: the largest found in 42 million elements
// are 3.5, 3.5 and 4.1, the last where the update dwarfs the parameter. What was measured is printed.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include <pacer/kernels/adam.h>

#include "support/carried_error.h"
#include "support/catch.h"
#include "support/kernels/adam_arrays.h"
#include "support/kernels/adam_error_model.h"
#include "support/samples.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::Carried;
using pacer::testing::Samples;

constexpr double kAllowedForMoments = 4, kAllowedForParameter = 5;

// The largest error of one quantity, in units, and as a part of the proven bound.
struct WorstError {
  double units = 0, part_of_bound = 0;
  int64_t compared = 0, unbounded = 0;

  template <class Real>
  void compare(Real computed, const Carried<Real>& exact) {
    if (!std::isfinite(exact.bound)) {
      ++unbounded;
      return;
    }
    ++compared;
    const long double error = std::abs(computed - exact.value);
    // NaN must count as an error: it compares false.
    if (!(error <= units * exact.unit)) units = worst(error, exact.unit);
    if (!(error <= part_of_bound * exact.bound)) part_of_bound = worst(error, exact.bound);
  }

 private:
  static double worst(long double error, long double measure) {
    return std::isnan(error) ? HUGE_VAL : static_cast<double>(error / measure);
  }
};

struct WorstErrors {
  WorstError m, v, p;

  template <class Real>
  void compare(const StateOf<Real>& computed, const StateOf<Carried<Real>>& exact) {
    m.compare(computed.m, exact.m);
    v.compare(computed.v, exact.v);
    p.compare(computed.p, exact.p);
  }

  void print(const char* what) const {
    std::printf(
        "%s: largest error m %.2f, v %.2f, p %.2f units (%.2f, %.2f, %.2f of the proven bound) in %lld "
        "elements\n",
        what, m.units, v.units, p.units, m.part_of_bound, v.part_of_bound, p.part_of_bound,
        static_cast<long long>(m.compared));
  }

  // `times` the allowed error: 2 for a comparison of two computed numbers.
  void check(double times) const {
    CHECK(m.units <= times * kAllowedForMoments);
    CHECK(v.units <= times * kAllowedForMoments);
    CHECK(p.units <= times * kAllowedForParameter);
    for (const WorstError* worst : {&m, &v, &p}) {
      CHECK(worst->part_of_bound <= 1.0);
      CHECK(worst->unbounded < worst->compared / 5);  // else the test would say little
    }
  }
};

double random_beta(Samples& samples) {
  if (samples.chance(0.3)) return 1 - samples.log_uniform(0x1p-25, 1);
  return samples.one_of({0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 0.999999, 1 - 0x1p-24});
}

ErrorCase random_error_case(Samples& samples) {
  ErrorCase c;
  RuleSettings& s = c.settings;
  s.learning_rate = samples.chance(0.5) ? samples.log_uniform(1e-5, 1) : samples.log_uniform(1e-30, 1e3);
  s.beta1 = random_beta(samples);
  s.beta2 = random_beta(samples);
  s.epsilon =
      samples.chance(0.5) ? samples.one_of({0.0, 1e-30, 1e-15, 1e-8, 1.0}) : samples.log_uniform(1e-30, 1);
  s.weight_decay = samples.chance(0.5) ? 0.01 : samples.log_uniform(1e-8, 10);
  s.factor = samples.chance(0.5) ? 1 : samples.log_uniform(1e-5, 1e5);
  s.decay_mode = samples.one_of({WeightDecay::none, WeightDecay::l2, WeightDecay::decoupled});
  s.bias_correction = samples.chance(0.9);
  c.step = samples.chance(0.3) ? 1 + samples.below(3) : static_cast<int64_t>(samples.log_uniform(1, 1e6));
  c.amsgrad = samples.chance(0.3);
  return c;
}

int64_t random_size(Samples& samples) {
  if (samples.chance(0.003)) return samples.below(4098);
  return samples.chance(0.2) ? samples.below(65) : samples.below(5);
}

// Magnitudes of one case; the elements lie around them. `tiny` reaches into the denormals of Real.
template <class Real>
struct Magnitudes {
  explicit Magnitudes(Samples& samples) {
    const bool single = std::numeric_limits<Real>::digits == 24;
    const double tiny = single ? 1e-44 : 1e-320, high = single ? 1e17 : 1e140, top = single ? 1e38 : 1e300;
    const bool usual = samples.chance(0.6);
    g = usual ? samples.log_uniform(1e-8, 1e2) : samples.log_uniform(tiny, high);
    p = usual ? samples.log_uniform(1e-4, 10) : samples.log_uniform(tiny, high);
    has_state = samples.chance(0.8);
    m = usual ? g : samples.log_uniform(tiny, high);
    v = usual ? g * g : samples.log_uniform(tiny, top);
  }
  double g, p, m, v;
  bool has_state;
};

template <class Real>
void random_element(Samples& samples, const ErrorCase& c, const Magnitudes<Real>& size, Real& gradient,
                    StateOf<Real>& e) {
  const auto around = [&](double magnitude) {
    return samples.chance(0.05) ? 0.0 : magnitude * samples.log_uniform(0.1, 3);
  };
  gradient = static_cast<Real>(samples.sign() * around(size.g));
  e.p = static_cast<Real>(samples.sign() * around(size.p));
  e.m = static_cast<Real>(size.has_state ? samples.sign() * around(size.m) : 0);
  e.v = static_cast<Real>(size.has_state ? around(size.v) : 0);
  e.largest_v = static_cast<Real>(size.has_state ? around(size.v) : 0);
  const RuleSettings& s = c.settings;
  if (samples.chance(0.1) && s.beta1 > 0) {  // m cancels
    e.m = static_cast<Real>(-(1 - s.beta1) / s.beta1 * s.factor * gradient * samples.log_uniform(0.9, 1.1));
  }
  if (samples.chance(0.1)) {  // the l2 gradient cancels
    gradient = static_cast<Real>(-s.weight_decay / s.factor * e.p * samples.log_uniform(0.999, 1.001));
  }
}

// `size` elements of one case, stepped by the kernel.
template <class Real>
std::vector<StateOf<Real>> step_by_kernel(const ErrorCase& c, const std::vector<Real>& gradients,
                                          const std::vector<StateOf<Real>>& before) {
  const size_t size = before.size();
  std::vector<Real> m(size), v(size), largest_v(size), p(size);
  for (size_t i = 0; i < size; ++i) {
    m[i] = before[i].m, v[i] = before[i].v, largest_v[i] = before[i].largest_v, p[i] = before[i].p;
  }
  constexpr AdamStorage kStorage = std::is_same_v<Real, double> ? AdamStorage::f64 : AdamStorage::f32;
  AdamGroupScalars scalars;
  scalars.set(0, kStorage, c.settings, c.step);
  const AdamTensor tensor{p.data(), m.data(), v.data(), largest_v.data(), nullptr, 0};
  const AdamGradient gradient{gradients.data(), 0};
  if (size > 0)
    adam_cpu({kStorage, c.amsgrad}, Tile{0, static_cast<uint32_t>(size), 0}, &tensor, &gradient,
             scalars.data());
  std::vector<StateOf<Real>> after(size);
  for (size_t i = 0; i < size; ++i) after[i] = {m[i], v[i], largest_v[i], p[i]};
  return after;
}

// The operations of torch::optim::Adam and AdamW in their order, each in float, the scalars in double.
StateOf<float> step_like_torch(const ErrorCase& c, float gradient, StateOf<float> e) {
  const RuleSettings& s = c.settings;
  const double t = static_cast<double>(c.step);
  const double c1 = s.bias_correction ? 1 - std::pow(s.beta1, t) : 1,
               c2 = s.bias_correction ? 1 - std::pow(s.beta2, t) : 1;
  float g = static_cast<float>(s.factor) * gradient;
  if (s.decay_mode == WeightDecay::l2) g = g + static_cast<float>(s.weight_decay) * e.p;
  if (s.decay_mode == WeightDecay::decoupled) e.p *= static_cast<float>(1 - s.learning_rate * s.weight_decay);
  e.m *= static_cast<float>(s.beta1);
  e.m += static_cast<float>(1 - s.beta1) * g;
  e.v *= static_cast<float>(s.beta2);
  e.v += static_cast<float>(1 - s.beta2) * g * g;
  if (c.amsgrad) e.largest_v = std::max(e.largest_v, e.v);
  const float denominator = std::sqrt(c.amsgrad ? e.largest_v : e.v) / static_cast<float>(std::sqrt(c2)) +
                            static_cast<float>(s.epsilon);
  e.p += static_cast<float>(-s.learning_rate / c1) * e.m / denominator;
  return e;
}

// The number computed in torch's order as what the kernel's is compared with.
Carried<float> as_peer(float peer, const Carried<float>& of_peer, const Carried<float>& mine) {
  return {peer, of_peer.bound + mine.bound, std::max(of_peer.unit, mine.unit)};
}

// How far torch's operations are from the exact step, and from the kernel.
struct TorchErrors {
  WorstErrors from_exact, from_kernel;
};

template <class Real>
WorstErrors worst_errors(int64_t cases, uint64_t seed, TorchErrors* torch) {
  WorstErrors worst;
  Samples samples(seed);
  for (int64_t i = 0; i < cases; ++i) {
    const ErrorCase c = random_error_case(samples);
    const Magnitudes<Real> magnitudes(samples);
    const size_t size = static_cast<size_t>(random_size(samples));
    std::vector<Real> gradients(size);
    std::vector<StateOf<Real>> before(size);
    for (size_t k = 0; k < size; ++k) random_element(samples, c, magnitudes, gradients[k], before[k]);
    const std::vector<StateOf<Real>> after = step_by_kernel(c, gradients, before);
    const CarriedScalars<Real> scalars = carried_scalars<Real>(c);
    for (size_t k = 0; k < size; ++k) {
      const StateOf<Carried<Real>> exact = carried_step(c, scalars, Order::kernel, gradients[k], before[k]);
      worst.compare(after[k], exact);
      if constexpr (std::is_same_v<Real, float>) {
        if (torch == nullptr) continue;
        const StateOf<float> peer = step_like_torch(c, gradients[k], before[k]);
        const auto of_peer = carried_step(c, scalars, Order::torch, gradients[k], before[k]);
        torch->from_exact.compare(peer, of_peer);
        torch->from_kernel.compare(after[k], {as_peer(peer.m, of_peer.m, exact.m),
                                              as_peer(peer.v, of_peer.v, exact.v),
                                              {},
                                              as_peer(peer.p, of_peer.p, exact.p)});
      }
    }
  }
  return worst;
}

int64_t number_of_cases() { return pacer::testing::wants_long_tests() ? 3000000 : 100000; }

}  // namespace

TEST_CASE("N1: an fp32 step is within 5 units of the exact one", "[kernels][adam][error-bound]") {
  const WorstErrors worst = worst_errors<float>(number_of_cases(), 1, nullptr);
  worst.print("fp32 kernel");
  worst.check(1);
}

TEST_CASE("N1: an fp64 step is within 5 units of the exact one", "[kernels][adam][error-bound]") {
  const WorstErrors worst = worst_errors<double>(number_of_cases() / 4, 2, nullptr);
  worst.print("fp64 kernel");
  worst.check(1);
}

TEST_CASE("N1: the operations of torch in fp32 have the same bound", "[kernels][adam][error-bound]") {
  TorchErrors torch;
  worst_errors<float>(number_of_cases() / 4, 3, &torch);
  torch.from_exact.print("fp32 in torch's order");
  torch.from_exact.check(1);
  torch.from_kernel.print("fp32 kernel against torch's order");
  torch.from_kernel.check(2);
}

}  // namespace pacer::kernels::testing
