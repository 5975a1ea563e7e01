#include <pacer/optimizers/detail/gradient_norms.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/reduction_order.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// How gradients are taken together: their largest magnitude, or the sum of (|x| / scale)^p.
struct NormTerm {
  bool is_largest;
  double p = 1;
  double scale = 1;
};

double larger_of(double a, double b) { return b > a || std::isnan(b) ? b : a; }

double power_of(double magnitude, const NormTerm& term) {
  if (term.p == 1) return magnitude;
  if (term.p == 2) return magnitude * magnitude;
  return std::pow(magnitude / term.scale, term.p);
}

// Of a unit's elements.
template <class Element>
double unit_term(const Element* elements, int64_t count, const NormTerm& term) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    const double magnitude = std::fabs(static_cast<double>(elements[i]));
    double& lane = lanes[i % kLanes];
    lane = term.is_largest ? larger_of(lane, magnitude) : lane + power_of(magnitude, term);
  }
  double all = 0;
  for (const double lane : lanes) all = term.is_largest ? larger_of(all, lane) : all + lane;
  return all;
}

double unit_term(const at::Tensor& values, const Tile& unit, const NormTerm& term) {
  const auto of = [&](const auto* data) { return unit_term(data + unit.offset, unit.count, term); };
  switch (values.scalar_type()) {
    case at::kDouble:
      return of(values.const_data_ptr<double>());
    case at::kBFloat16:
      return of(values.const_data_ptr<c10::BFloat16>());
    case at::kHalf:
      return of(values.const_data_ptr<c10::Half>());
    default:
      return of(values.const_data_ptr<float>());
  }
}

// Each is dense, real and of a dtype that unit_term reads.
double term_on_cpu(const std::vector<at::Tensor>& gradients, const NormTerm& term) {
  std::vector<at::Tensor> dense;
  std::vector<int64_t> counts;
  for (const at::Tensor& gradient : gradients) {
    const bool is_plain =
        gradient.is_non_overlapping_and_dense() && !gradient.is_neg() && !gradient._is_zerotensor();
    dense.push_back(is_plain ? gradient : gradient.clone(at::MemoryFormat::Contiguous));
    counts.push_back(dense.back().numel());
  }
  const std::vector<Tile> units = make_tiles(counts, kReductionUnit);
  std::vector<double> terms(units.size());
  for_each_tile(units, [&](int64_t i) {
    const Tile& unit = units[static_cast<size_t>(i)];
    terms[static_cast<size_t>(i)] = unit_term(dense[unit.tensor], unit, term);
  });
  if (!term.is_largest) return sum_partials(terms.data(), static_cast<int64_t>(terms.size()));
  double largest = 0;
  for (const double of_unit : terms) largest = larger_of(largest, of_unit);
  return largest;
}

// `scale`: where the term has one, fp64 on the device.
at::Tensor term_on_gpu(const std::vector<at::Tensor>& gradients, const NormTerm& term,
                       const at::Tensor& scale, at::Device device) {
  std::vector<at::Tensor> terms;
  if (scale.defined()) {
    for (const at::Tensor& gradient : gradients) {
      const bool is_narrow = gradient.scalar_type() != at::kDouble;
      const at::Tensor values = is_narrow ? gradient.to(at::kFloat) : gradient;
      terms.push_back((values.abs() / scale.to(gradient.device())).pow(term.p).sum(at::kDouble).to(device));
    }
    return at::stack(terms).sum();
  }
  std::vector<at::Tensor> wide, others;
  for (const at::Tensor& gradient : gradients)
    (gradient.scalar_type() == at::kDouble ? wide : others).push_back(gradient);
  for (const auto* alike : {&wide, &others}) {
    if (alike->empty()) continue;
    const double order = term.is_largest ? kInfinity : term.p;
    for (const at::Tensor& norm :
         at::_foreach_norm(*alike, order, alike == &wide ? at::kDouble : at::kFloat)) {
      terms.push_back(norm.to(at::TensorOptions().dtype(at::kDouble).device(device)));
    }
  }
  const at::Tensor all = at::stack(terms);
  return term.is_largest ? all.max() : term.p == 2 ? all.square().sum() : all.sum();
}

struct Gradients {
  std::vector<at::Tensor> on_cpu, on_gpu;
};

Gradients real_gradients(const std::vector<at::Tensor>& gradients) {
  Gradients real;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.numel() == 0) continue;
    at::Tensor values = gradient.is_complex() ? gradient.abs() : gradient;
    const at::ScalarType type = values.scalar_type();
    if (type != at::kDouble && type != at::kFloat && type != at::kBFloat16 && type != at::kHalf)
      values = values.to(at::kFloat);
    (values.is_cpu() ? real.on_cpu : real.on_gpu).push_back(std::move(values));
  }
  return real;
}

// fp64, no dimensions, on the device. `scale`: undefined for 1.
at::Tensor term_of(const Gradients& gradients, NormTerm term, const at::Tensor& scale, at::Device device,
                   Communicator* ranks) {
  if (scale.defined() && !gradients.on_cpu.empty()) term.scale = scale.item<double>();
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device);
  at::Tensor all = at::full({}, term_on_cpu(gradients.on_cpu, term), options);
  if (!gradients.on_gpu.empty()) {
    const at::Tensor of_gpu = term_on_gpu(gradients.on_gpu, term, scale, device);
    all = term.is_largest ? at::stack({all, of_gpu}).max() : all + of_gpu;
  }
  if (ranks == nullptr || ranks->world_size() == 1) return all;
  at::Tensor of_ranks = at::empty({ranks->world_size()}, options);
  ranks->all_gather(of_ranks, all.view({1}), CollectiveOptions().agreed(true)).wait();
  return term.is_largest ? of_ranks.max() : of_ranks.sum();
}

}  // namespace

at::Tensor gradient_norm(const std::vector<at::Tensor>& gradients, double p, at::Device device,
                         Communicator* ranks) {
  const Gradients real = real_gradients(gradients);
  if (p == 1 || p == 2) {
    const at::Tensor sum = term_of(real, {/*is_largest=*/false, p}, {}, device, ranks);
    return p == 1 ? sum : sum.sqrt();
  }
  const at::Tensor largest = term_of(real, {/*is_largest=*/true}, {}, device, ranks);
  if (p == kInfinity) return largest;
  const at::Tensor scale = at::where(largest == 0, 1.0, largest);
  return largest * term_of(real, {/*is_largest=*/false, p}, scale, device, ranks).pow(1 / p);
}

}  // namespace pacer::detail
