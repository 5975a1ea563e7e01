#include <pacer/optimizers/detail/orthogonalize.h>

#include <algorithm>
#include <array>

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>

namespace pacer::detail {
namespace {

struct Coefficients {
  double a, b, c;
};

// K. Jordan's, which do not converge but get near 1 soon.
constexpr Coefficients kQuintic = {3.4445, -4.7750, 2.0315};
// Amsel et al., arXiv:2505.16932: the best polynomials one behind the other for singular values from 1e-3 on.
// The last stays.
constexpr std::array<Coefficients, 8> kPolarExpress = {{
    {8.28721201814563, -23.595886519098837, 17.300387312530933},
    {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
    {3.3184196573706015, -2.488488024314874, 0.51004894012372},
    {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
    {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
    {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
    {1.875, -1.25, 0.375},
}};
// Those polynomials grow fast beyond 1, which rounding may reach.
constexpr double kBelowOne = 1.01;
constexpr double kSmallestNorm = 1e-7;

Coefficients coefficients_of(MuonCoefficients which, int64_t iteration) {
  if (which == MuonCoefficients::quintic) return kQuintic;
  return kPolarExpress[std::min(static_cast<size_t>(iteration), kPolarExpress.size() - 1)];
}

}  // namespace

at::Tensor orthogonalized(const at::Tensor& matrices, MuonCoefficients coefficients, int64_t iterations,
                          double scale, const at::Tensor& into) {
  const bool is_wide = matrices.size(1) <= matrices.size(2);
  const double margin = coefficients == MuonCoefficients::polar_express ? kBelowOne : 1;
  at::Tensor norm = at::linalg_vector_norm(matrices, 2, at::IntArrayRef({1, 2}), /*keepdim=*/true);
  at::Tensor x = at::div(matrices, norm.mul_(margin).clamp_min_(kSmallestNorm));
  for (int64_t i = 0; i < iterations; ++i) {
    const auto [a, b, c] = coefficients_of(coefficients, i);
    const bool is_last = i + 1 == iterations;
    const double factor = is_last ? scale : 1;
    // The product of the smaller size.
    const at::Tensor gram = is_wide ? at::bmm(x, x.transpose(1, 2)) : at::bmm(x.transpose(1, 2), x);
    const at::Tensor polynomial = at::baddbmm(gram, gram, gram, b, c);
    const at::Tensor& left = is_wide ? polynomial : x;
    const at::Tensor& right = is_wide ? x : polynomial;
    at::Tensor to = is_last && into.defined() ? into : at::empty_like(x);
    at::baddbmm_out(to, x, left, right, a * factor, factor);
    x = to;
  }
  return x;
}

}  // namespace pacer::detail
