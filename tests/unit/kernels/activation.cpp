// Activations on the CPU beside fp64: functions over all numbers of 16 bits and many floats, rows beside
// LibTorch's operators, and 8-bit floats beside the cast of what was rounded.
#include "support/catch.h"

#include <cmath>
#include <limits>

#include "support/kernels/activation_reference.h"

namespace pacer::testing::kernels_activation {
namespace {

using kernels::Fp8Format;

constexpr Activation kActivations[] = {Activation::gelu, Activation::swiglu};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A function, its derivative and how far off the derivative may be, by the formulas of
// kernels/math/activation.h in fp64.
struct Exact {
  double value, derivative, terms, power;  // power: w, of 2^w
};
Exact exact(double x, double slope, double power) {
  const double up = 1 / (1 + std::exp2(power)), down = 1 / (1 + std::exp2(-power));
  return {x * up, up + up * slope * down, up * (1 + std::fabs(slope) * down), power};
}
Exact exact_gelu(double x) {
  const double factor = 2 * std::sqrt(2 / M_PI);
  return exact(x, x * factor * (1 + 3 * 0.044715 * x * x), -factor * M_LOG2E * x * (1 + 0.044715 * x * x));
}
Exact exact_silu(double x) { return exact(x, x, -M_LOG2E * x); }

void check_function(float x) {
  const Exact gelu = exact_gelu(x), silu = exact_silu(x);
  const auto is_near = [](float found, double wanted, double units, double of) {
    return std::fabs(found - wanted) <= units * 0x1p-23 * std::fabs(of) + 1e-35;
  };
  const double more = 2.0 / 3 * std::min(std::fabs(gelu.power), 126.0);
  const bool is_right = is_near(kernels::gelu(x), gelu.value, 4 + more, gelu.value) &&
                        is_near(kernels::gelu_derivative(x), gelu.derivative, 6 + more, gelu.terms) &&
                        is_near(kernels::silu(x), silu.value, 3, silu.value) &&
                        is_near(kernels::silu_derivative(x), silu.derivative, 4, silu.terms);
  if (is_right) return;  // assertions are too slow for so many numbers
  FAIL("at " << x << ": " << kernels::gelu(x) << " " << kernels::gelu_derivative(x) << " " << kernels::silu(x)
             << " " << kernels::silu_derivative(x));
}

struct Inputs {
  Tensor u, bias, dy;
};
Inputs random_inputs(Activation activation, int64_t rows, int64_t columns, at::ScalarType dtype) {
  const int64_t width = columns * kernels::activation_inputs(activation);
  return {(torch::randn({rows, width}) * 2).to(dtype), torch::randn({width}).to(dtype),
          torch::randn({rows, columns}).to(dtype)};
}

// In two parts, which end between parts of sums.
ActivationResults run(Activation activation, const Inputs& inputs, bool backward,
                      const ActivationWishes& wishes) {
  return run_activation(
      activation, inputs.u, inputs.bias, backward ? inputs.dy : Tensor(), wishes, [](const auto& work) {
        const int64_t middle = work.rows / 256 * 128;
        for (const auto& [begin, end] : {std::pair{int64_t{0}, middle}, {middle, work.rows}}) {
          if constexpr (std::is_same_v<std::decay_t<decltype(work)>, kernels::ActivationForward>) {
            kernels::activation_cpu(work, begin, end);
          } else {
            kernels::activation_backward_cpu(work, begin, end);
          }
        }
      });
}

// Of one rounding to the dtype and of the functions.
double bound_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? 2e-6 : dtype == at::kBFloat16 ? 0x1.01p-8 : 0x1.01p-11;
}

uint32_t amax_of_state(const ActivationResults& made) {
  return reinterpret_cast<const kernels::Fp8Scale*>(made.state.const_data_ptr())->amax;
}

}  // namespace

TEST_CASE("GELU and SiLU and their derivatives are as near as their header says", "[kernels][activation]") {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 4099) {
    const float x = kernels::float_of(static_cast<uint32_t>(bits));
    if (std::isfinite(x)) check_function(x);
  }
  for (uint32_t bits = 0; bits < (1u << 16); ++bits) {
    const float x = kernels::float_of(bits << 16);
    if (std::isfinite(x)) check_function(x);
  }
  for (double x = -128; x < 128; x += 1.0 / 1024) check_function(static_cast<float>(x));
  // Worked out by hand elsewhere, so that the formulas above are not their own witnesses.
  CHECK(kernels::gelu(1.0f) == Catch::Approx(0.8411919906082768).epsilon(1e-6));
  CHECK(kernels::gelu(-3.0f) == Catch::Approx(-0.0036373920817729943).epsilon(1e-6));
  CHECK(kernels::silu(1.0f) == Catch::Approx(0.7310585786300049).epsilon(1e-6));
}

TEST_CASE("activations of infinities, NaN and zeros are what they tend to", "[kernels][activation]") {
  CHECK(kernels::gelu(kInfinity) == kInfinity);
  CHECK(kernels::silu(kInfinity) == kInfinity);
  CHECK(kernels::gelu(-kInfinity) == 0);
  CHECK(kernels::silu(-kInfinity) == 0);
  CHECK(kernels::gelu_derivative(kInfinity) == 1);
  CHECK(kernels::silu_derivative(kInfinity) == 1);
  CHECK(kernels::gelu_derivative(-kInfinity) == 0);
  CHECK(kernels::silu_derivative(-kInfinity) == 0);
  for (const float nan : {std::nanf(""), -std::nanf("")}) {
    CHECK(std::isnan(kernels::gelu(nan)));
    CHECK(std::isnan(kernels::silu(nan)));
    CHECK(std::isnan(kernels::gelu_derivative(nan)));
    CHECK(std::isnan(kernels::silu_derivative(nan)));
  }
  for (const float zero : {0.0f, -0.0f}) {
    CHECK(kernels::bits_of(kernels::gelu(zero)) == kernels::bits_of(zero));
    CHECK(kernels::bits_of(kernels::silu(zero)) == kernels::bits_of(zero));
    CHECK(kernels::gelu_derivative(zero) == 0.5f);
    CHECK(kernels::silu_derivative(zero) == 0.5f);
  }
}

// The device's own steps of a division leave these out (kernels/math/activation.h).
TEST_CASE("no number leads to a reciprocal at the edge of what is normal", "[kernels][activation]") {
  const auto is_edge = [](const kernels::ActivationTerms& terms) {
    const uint32_t distance = kernels::bits_of(1.0f + terms.power) - kernels::bits_of(0x1p126f);
    return distance + 2 <= 4;
  };
  int64_t edges = 0, looked_at = 0;
  for (uint32_t bits = kernels::bits_of(-9.9f); bits <= kernels::bits_of(-10.1f); ++bits, ++looked_at) {
    edges += is_edge(kernels::gelu_terms(kernels::float_of(bits)));
  }
  for (uint32_t bits = kernels::bits_of(-87.0f); bits <= kernels::bits_of(-88.0f); ++bits, ++looked_at) {
    edges += is_edge(kernels::silu_terms(kernels::float_of(bits)));
  }
  CHECK(looked_at > 300000);
  CHECK(edges == 0);
}

TEST_CASE("rows of activations and their gradients are those of LibTorch in fp64", "[kernels][activation]") {
  torch::manual_seed(1);
  for (const Activation activation : kActivations) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const auto& [rows, columns] : {std::pair{3, 5}, {200, 136}, {1, 300}, {300, 1}}) {
        for (const bool has_bias : {false, true}) {
          CAPTURE(activation == Activation::gelu, dtype, rows, columns, has_bias);
          Inputs inputs = random_inputs(activation, rows, columns, dtype);
          if (!has_bias) inputs.bias = Tensor();
          const auto is_near = [&](const Tensor& found, const Tensor& wanted) {
            const Tensor off = (found.to(at::kDouble) - wanted).abs();
            return (off <= wanted.abs() * bound_of(dtype) + 1e-6).all().item<bool>();
          };
          REQUIRE(is_near(run(activation, inputs, false, {}).values,
                          activation_reference(activation, inputs.u, inputs.bias)));
          REQUIRE(is_near(run(activation, inputs, true, {}).values,
                          activation_gradient_reference(activation, inputs.u, inputs.bias, inputs.dy)));
        }
      }
    }
  }
}

TEST_CASE("8-bit floats, amax and sums are those of the values that were rounded", "[kernels][activation]") {
  torch::manual_seed(2);
  for (const Activation activation : kActivations) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const bool backward : {false, true}) {
        const Inputs inputs = random_inputs(activation, 300, 208, dtype);
        const Tensor values = run(activation, inputs, backward, {}).values;
        const uint32_t amax = amax_bits(values);
        for (const bool keeps : {false, true}) {
          CAPTURE(activation == Activation::gelu, dtype, backward, keeps);
          ActivationWishes wishes;
          wishes.values = keeps;
          wishes.codes = true;
          wishes.transposed = true;
          wishes.sums = backward;
          wishes.format = backward ? Fp8Format::e5m2 : Fp8Format::e4m3;
          const ActivationResults delayed = run(activation, inputs, backward, wishes);
          REQUIRE(delayed.codes.equal(fp8_codes(values, 4, wishes.format)));
          REQUIRE(amax_of_state(delayed) == amax);
          REQUIRE(delayed.inverse.item<float>() == 0.25f);
          if (keeps) REQUIRE(delayed.values.equal(values));
          REQUIRE(delayed.transposed.equal(delayed.codes.t().contiguous()));
          if (backward) REQUIRE(delayed.sums.equal(fp8_column_sums(values)));
          wishes.scale = 0;
          wishes.amax = kernels::bits_of(100.0f);
          REQUIRE(run(activation, inputs, backward, wishes)
                      .codes.equal(fp8_codes(values, kernels::fp8_scale(wishes.amax, wishes.format, {}),
                                             wishes.format)));

          ActivationWishes measuring;
          measuring.values = keeps;
          measuring.measures = true;
          measuring.sums = backward;
          measuring.scale = 0;
          const ActivationResults measured = run(activation, inputs, backward, measuring);
          REQUIRE(static_cast<uint32_t>(measured.measured.item<int32_t>()) == amax);
          if (keeps) REQUIRE(measured.values.equal(values));
          if (backward) {
            REQUIRE(measured.sums.equal(keeps ? fp8_column_sums(values) : at::full_like(measured.sums, 7)));
          }
          measuring.scale = 4;  // there is a history, so that nobody needs the amax
          const ActivationResults known = run(activation, inputs, backward, measuring);
          REQUIRE(known.measured.item<int32_t>() == 0);
          if (keeps) REQUIRE(known.values.equal(values));
        }
        ActivationWishes sums;
        sums.values = false;
        sums.sums = true;
        if (backward) REQUIRE(run(activation, inputs, true, sums).sums.equal(fp8_column_sums(values)));
      }
    }
  }
}

}  // namespace pacer::testing::kernels_activation
