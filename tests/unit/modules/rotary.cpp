// Rotary positions beside complex numbers in fp64, with offsets, frequencies of one's own and recomputation.
#include "support/catch.h"

#include <cmath>
#include <limits>
#include <vector>

#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <pacer/modules/recompute.h>
#include <pacer/modules/rotary.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing::rotary_positions {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::Rotary;

// A pair of channels as a complex number, multiplied with e^(i angle).
Tensor by_complex_numbers(const Tensor& x, double theta, int64_t offset) {
  const int64_t half = x.size(-1) / 2;
  const auto doubles = torch::TensorOptions().dtype(at::kDouble);
  const Tensor frequencies =
      torch::pow(theta, torch::arange(half, doubles) * (-1.0 / static_cast<double>(half)));
  const Tensor angles = (torch::arange(x.size(2), doubles) + offset).unsqueeze(1) * frequencies;
  const Tensor turns = torch::polar(torch::ones_like(angles), angles);
  const Tensor wide = x.to(at::kDouble);
  const Tensor turned = torch::complex(wide.narrow(-1, 0, half), wide.narrow(-1, half, half)) * turns;
  return torch::cat({torch::real(turned), torch::imag(turned)}, -1);
}

double error(const Tensor& found, const Tensor& wanted) {
  return (found.to(at::kDouble) - wanted).abs().max().item<double>();
}

}  // namespace

TEST_CASE("rotary turns queries and keys by their positions, and their gradients back", "[modules][rotary]") {
  torch::manual_seed(1);
  for (const double theta : {10'000.0, 5e5}) {
    for (const int64_t offset : {int64_t{0}, int64_t{37}}) {
      CAPTURE(theta, offset);
      Rotary positions(theta);
      positions.set_offset(offset);
      CHECK(positions.offset() == offset);
      const Tensor q = torch::randn({2, 4, 50, 16}).requires_grad_(), k = torch::randn({2, 2, 50, 16});
      const Tensor exact_q = q.detach().to(at::kDouble).requires_grad_();
      const auto [turned_q, turned_k] = modules::rotary(q, k, positions);
      const Tensor wanted = by_complex_numbers(exact_q, theta, offset);
      CHECK(turned_q.sizes() == q.sizes());
      CHECK(error(turned_q, wanted) < 1e-6);
      CHECK(error(turned_k, by_complex_numbers(k, theta, offset)) < 1e-6);
      CHECK_FALSE(turned_k.requires_grad());
      const Tensor dq = torch::randn_like(q);
      turned_q.backward(dq);
      wanted.backward(dq.to(at::kDouble));
      CHECK(error(q.grad(), exact_q.grad()) < 1e-6);
    }
  }
}

TEST_CASE("rotary rounds once to 16 bits, in any layout of memory", "[modules][rotary]") {
  torch::manual_seed(2);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const double unit = dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
    const Tensor q = torch::randn({2, 12, 3, 16}).to(dtype).transpose(1, 2),
                 k = torch::randn({2, 1, 12, 16}).to(dtype);
    const auto [turned_q, turned_k] = modules::rotary(q, k, Rotary());
    CHECK(turned_q.scalar_type() == dtype);
    const Tensor wanted = by_complex_numbers(q, 1e4, 0);
    CHECK((turned_q.to(at::kDouble) - wanted).abs().le(wanted.abs() * unit + 1e-6).all().item<bool>());
    CHECK(error(turned_k, by_complex_numbers(k, 1e4, 0)) < 4 * unit);
  }
}

TEST_CASE("what attention sees of rotary positions is how far they are apart", "[modules][rotary]") {
  torch::manual_seed(3);
  const Tensor q = torch::randn({1, 1, 8, 32}), k = torch::randn({1, 1, 8, 32});
  Rotary positions(1e4);
  const auto scores = [&] {
    const auto [turned_q, turned_k] = modules::rotary(q, k, positions);
    return turned_q.matmul(turned_k.transpose(2, 3));
  };
  const Tensor at_zero = scores();
  positions.set_offset(100);
  CHECK(error(scores(), at_zero.to(at::kDouble)) < 1e-4);
  CHECK(error(at_zero, q.matmul(k.transpose(2, 3)).to(at::kDouble)) > 0.1);
}

TEST_CASE("copies of a Rotary are one, with tables that grow and angles of their own frequencies",
          "[modules][rotary]") {
  Rotary positions(std::vector<double>{0.5, 0.25});
  const Rotary copy = positions;
  const auto few = copy.angles(3, 4, at::kCPU);
  CHECK(few.cosines.sizes() == at::IntArrayRef({3, 2}));
  CHECK(few.cosines[2][1].item<float>() == static_cast<float>(std::cos(0.5)));
  CHECK(few.sines[2][0].item<float>() == static_cast<float>(std::sin(1.0)));
  const auto again = copy.angles(3, 4, at::kCPU);
  CHECK(again.sines.data_ptr() == few.sines.data_ptr());
  positions.set_offset(1000);
  const auto later = copy.angles(2, 4, at::kCPU);
  CHECK(later.cosines[1][0].item<float>() == static_cast<float>(std::cos(500.5)));
  positions.set_offset(2);
  CHECK(copy.angles(1, 4, at::kCPU).sines.equal(few.sines.narrow(0, 2, 1)));
}

// In wavelengths, as the rule is published: those of more than 64 / 1 positions go slower by the factor, those of less than
// 64 / 4 as before.
TEST_CASE("scaled positions turn more slowly where a turn takes longer than the first training",
          "[modules][rotary]") {
  constexpr double kLength = 64, kFactor = 8, kTurn = 6.283185307179586;
  const Rotary scaled(100.0, modules::RotaryScaling().factor(kFactor).original_length(64));
  const Rotary plain(100.0);
  const auto of = [](const Rotary& positions, int64_t pair) {
    return std::asin(positions.angles(2, 8, at::kCPU).sines[1][pair].item<double>());
  };
  for (int64_t pair = 0; pair < 4; ++pair) {
    CAPTURE(pair);
    const double frequency = of(plain, pair), wavelength = kTurn / frequency;
    const double share = (kLength / wavelength - 1) / (4 - 1);
    const double wanted = wavelength < kLength / 4   ? frequency
                          : wavelength > kLength / 1 ? frequency / kFactor
                                                     : share * frequency + (1 - share) * frequency / kFactor;
    CHECK(of(scaled, pair) == Catch::Approx(wanted).epsilon(1e-6));
  }
  CHECK(of(scaled, 0) == of(plain, 0));
  CHECK(of(scaled, 1) < 0.8 * of(plain, 1));
  CHECK(of(scaled, 1) > 0.5 * of(plain, 1));
  CHECK(of(scaled, 3) == Catch::Approx(of(plain, 3) / 8).epsilon(1e-6));
  CHECK(scaled.angles(2, 64, at::kCPU).sines.size(1) == 32);  // heads of any size, as without scaling
}

TEST_CASE("a recomputed region has the offset of its forward pass", "[modules][rotary]") {
  torch::manual_seed(4);
  Rotary positions;
  const Tensor k = torch::randn({1, 1, 6, 8}), weights = torch::randn({1, 1, 6, 6});
  const Tensor q = torch::randn({1, 1, 6, 8}).requires_grad_(), plain = q.detach().clone().requires_grad_();
  torch::nn::Module no_parameters;
  // Squares, so that backward needs what is recomputed.
  const auto loss = [&](const Tensor& x) {
    return modules::rotary(x, k, positions).first.narrow(2, 5, 1).pow(3);
  };
  positions.set_offset(9);
  loss(plain).sum().backward();
  const Tensor y = recompute(no_parameters, loss, q);
  positions.set_offset(0);
  y.sum().backward();
  CHECK(q.grad().equal(plain.grad()));
}

TEST_CASE("rotary refuses what it cannot do", "[modules][rotary][errors]") {
  for (const double theta : {0.0, -1.0, std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS_WITH(Rotary(theta), ContainsSubstring("a theta above 0"));
  }
  using modules::RotaryScaling;
  for (const double factor : {0.5, std::nan("")}) {
    CHECK_THROWS_WITH(Rotary(100.0, RotaryScaling().factor(factor)),
                      ContainsSubstring("RotaryScaling::factor must be a number from 1 on"));
  }
  CHECK_THROWS_WITH(Rotary(100.0, RotaryScaling().high_frequency_factor(1)),
                    ContainsSubstring("must be above low_frequency_factor, and both above 0, not 1 and 1"));
  CHECK_THROWS_WITH(Rotary(100.0, RotaryScaling().low_frequency_factor(0)),
                    ContainsSubstring("both above 0"));
  CHECK_THROWS_WITH(Rotary(100.0, RotaryScaling().original_length(0)),
                    ContainsSubstring("original_length must be at least 1, not 0"));
  CHECK_THROWS_WITH(Rotary(std::vector<double>{}), ContainsSubstring("a frequency for each pair"));
  CHECK_THROWS_WITH(Rotary(std::vector<double>{std::nan("")}), ContainsSubstring("no number"));
  Rotary positions;
  CHECK_THROWS_WITH(positions.set_offset(-1), ContainsSubstring("0 or more, not -1"));
  CHECK_THROWS_WITH(positions.angles(4, 7, at::kCPU), ContainsSubstring("pairs of channels"));
  CHECK_THROWS_WITH(Rotary(std::vector<double>{1.0}).angles(4, 8, at::kCPU),
                    ContainsSubstring("1 frequencies, for heads of 2 channels, but these have 8"));
  const Tensor q = torch::randn({1, 2, 4, 8}).requires_grad_();
  CHECK_THROWS_WITH(modules::rotary(q, torch::randn({1, 2, 5, 8}), positions),
                    ContainsSubstring("[1, 2, 5, 8]"));
  CHECK_THROWS_WITH(modules::rotary(q, torch::randn({1, 2, 4, 8}, at::kHalf), positions),
                    ContainsSubstring("of one dtype"));
  const Tensor turned = modules::rotary(q, q, positions).first;
  CHECK_THROWS_WITH(torch::autograd::grad({turned.sum()}, {q}, {}, std::nullopt, /*create_graph=*/true),
                    ContainsSubstring("no second derivative"));
}

}  // namespace pacer::testing::rotary_positions
