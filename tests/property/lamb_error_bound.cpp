// How far one LAMB step may be from the exact one, tensor by tensor. The rule is restated once, in arithmetic
// that carries a proven bound of its rounding errors (support/kernels/lamb_error_model.h); every result of the
// kernels must lie within that bound for random hyperparameters, sizes and values of any magnitude, and
// within a few units: the effect of one ULP of the largest term of any one operation on the way, carried to
// the result. For the sum of squares that is one ULP of the sum, of the 27 additions whose errors it can
// contain.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include <pacer/kernels/lamb.h>

#include "support/catch.h"
#include "support/kernels/lamb_error_model.h"
#include "support/kernels/lamb_kernels.h"
#include "support/samples.h"

namespace pacer::kernels::testing::lamb_bound {
namespace {

using pacer::testing::wants_long_tests;

constexpr double kAllowedForMoments = 4, kAllowedForRatio = 4, kAllowedForParameter = 5;

// The largest error of one quantity, in units, and as a part of the proven bound.
struct WorstOf {
  double units = 0, part_of_bound = 0;
  int64_t compared = 0, unbounded = 0;

  template <class Real>
  void compare(long double computed, const Carried<Real>& exact) {
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
  void check(const char* what, double allowed) const {
    INFO(what);
    CHECK(units <= allowed);
    CHECK(part_of_bound <= 1.0);
    CHECK(unbounded < compared / 5);  // else the test would say little
  }

 private:
  static double worst(long double error, long double measure) {
    return std::isnan(error) ? HUGE_VAL : static_cast<double>(error / measure);
  }
};

struct WorstErrors {
  WorstOf m, v, ratio, p;
  int64_t free_ratios = 0;  // neither bounded nor 1

  void check(const char* type) const {
    std::printf(
        "%s LAMB: largest error m %.2f, v %.2f, ratio %.2f, p %.2f units (%.2f, %.2f, %.2f, %.2f of the "
        "proven "
        "bound) in %lld elements of %lld tensors\n",
        type, m.units, v.units, ratio.units, p.units, m.part_of_bound, v.part_of_bound, ratio.part_of_bound,
        p.part_of_bound, static_cast<long long>(p.compared), static_cast<long long>(ratio.compared));
    m.check("m", kAllowedForMoments);
    v.check("v", kAllowedForMoments);
    ratio.check("ratio", kAllowedForRatio);
    p.check("p", kAllowedForParameter);
    CHECK(free_ratios > ratio.compared / 4);
  }
};

double random_beta(Samples& samples) {
  if (samples.chance(0.3)) return 1 - samples.log_uniform(0x1p-25, 1);
  return samples.one_of({0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1 - 0x1p-24});
}

RuleSettings random_settings(Samples& samples) {
  RuleSettings s;
  s.learning_rate = samples.chance(0.5) ? samples.log_uniform(1e-5, 1) : samples.log_uniform(1e-30, 1e3);
  s.beta1 = random_beta(samples);
  s.beta2 = random_beta(samples);
  s.epsilon = samples.chance(0.5) ? samples.one_of({1e-15, 1e-8, 1e-6, 1.0}) : samples.log_uniform(1e-20, 1);
  s.weight_decay = samples.one_of({0.0, 0.01, samples.log_uniform(1e-8, 10)});
  s.factor = samples.chance(0.5) ? 1 : samples.log_uniform(1e-5, 1e5);
  s.bias_correction = samples.chance(0.8);
  s.adapt = samples.chance(0.9);
  if (samples.chance(0.5)) {
    s.min_coeff = 0;
    s.max_coeff = 1e30;
  } else {
    s.min_coeff = samples.one_of({0.0, 0.01, 0.5});
    s.max_coeff = samples.one_of({0.5, 10.0, 1000.0});
  }
  return s;
}

int64_t random_size(Samples& samples) {
  if (samples.chance(0.0005)) return 32768 + samples.below(70000);
  if (samples.chance(0.01)) return samples.below(4098);
  return samples.chance(0.3) ? samples.below(65) : samples.below(5);
}

// Elements around one magnitude each of g, p, m and v.
template <class Real>
void random_tensor(Samples& samples, const RuleSettings& s, size_t size, std::vector<Real>& gradients,
                   std::vector<StateOf<Real>>& before) {
  const bool single = std::numeric_limits<Real>::digits == 24;
  const double tiny = single ? 1e-30 : 1e-200, high = single ? 1e17 : 1e140;
  const bool usual = samples.chance(0.7), has_state = samples.chance(0.8);
  const double g = usual ? samples.log_uniform(1e-8, 1e2) : samples.log_uniform(tiny, high);
  const double p = usual ? samples.log_uniform(1e-4, 10) : samples.log_uniform(single ? 1e-20 : 1e-150, high);
  const double m = usual ? g : samples.log_uniform(tiny, high);
  const double v = usual ? g * g : samples.log_uniform(tiny, high);
  const bool zero_parameter = samples.chance(0.03), zero_update = samples.chance(0.03);
  const auto around = [&](double magnitude) {
    return samples.chance(0.05) ? 0.0 : magnitude * samples.log_uniform(0.1, 3);
  };
  gradients.resize(size);
  before.resize(size);
  for (size_t i = 0; i < size; ++i) {
    StateOf<Real>& e = before[i];
    gradients[i] = static_cast<Real>(zero_update ? 0 : samples.sign() * around(g));
    e.p = static_cast<Real>(zero_parameter ? 0 : samples.sign() * around(p));
    e.m = static_cast<Real>(has_state && !zero_update ? samples.sign() * around(m) : 0);
    e.v = static_cast<Real>(has_state ? around(v) : 0);
    e.largest_v = 0;
    if (samples.chance(0.1) && s.beta1 > 0 && !zero_update) {  // m cancels
      e.m = static_cast<Real>(-(1 - s.beta1) / s.beta1 * s.factor * gradients[i] *
                              samples.log_uniform(0.9, 1.1));
    }
  }
}

template <class Real>
WorstErrors worst_errors(int64_t cases, uint64_t seed) {
  constexpr AdamStorage kStorage = std::is_same_v<Real, double> ? AdamStorage::f64 : AdamStorage::f32;
  WorstErrors worst;
  Samples samples(seed);
  for (int64_t i = 0; i < cases; ++i) {
    const RuleSettings settings = random_settings(samples);
    const int64_t step =
        samples.chance(0.3) ? 1 + samples.below(3) : static_cast<int64_t>(samples.log_uniform(1, 1e6));
    const size_t size = static_cast<size_t>(random_size(samples));
    std::vector<Real> gradients;
    std::vector<StateOf<Real>> before;
    random_tensor(samples, settings, size, gradients, before);

    std::vector<Real> m(size), v(size), p(size);
    for (size_t k = 0; k < size; ++k) m[k] = before[k].m, v[k] = before[k].v, p[k] = before[k].p;
    LambGroupScalars scalars;
    scalars.set(0, kStorage, settings, step);
    const AdamTensor tensor{p.data(), m.data(), v.data(), nullptr, nullptr, 0};
    const LambOutcome outcome =
        lamb_step_on_cpu(kStorage, tensor, gradients.data(), static_cast<int64_t>(size), scalars.data());
    const CarriedLamb<Real> exact = carried_lamb_step(settings, step, gradients, before);
    if (size > 0) worst.ratio.compare(outcome.ratio.ratio, exact.ratio);
    worst.free_ratios += size > 0 && std::isfinite(exact.ratio.bound) && exact.ratio.bound > 0;
    for (size_t k = 0; k < size; ++k) {
      worst.m.compare(m[k], exact.elements[k].m);
      worst.v.compare(v[k], exact.elements[k].v);
      worst.p.compare(p[k], exact.elements[k].p);
    }
  }
  return worst;
}

int64_t number_of_cases() { return wants_long_tests() ? 2000000 : 30000; }

}  // namespace

TEST_CASE("N1: an fp32 LAMB step is within a few units of the exact one", "[kernels][lamb][error-bound]") {
  worst_errors<float>(number_of_cases(), 1).check("fp32");
}

TEST_CASE("N1: an fp64 LAMB step is within a few units of the exact one", "[kernels][lamb][error-bound]") {
  worst_errors<double>(number_of_cases() / 4, 2).check("fp64");
}

}  // namespace pacer::kernels::testing::lamb_bound
