#include <pacer/optimizers/detail/tensor_sums.h>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/reduction_order.h>
#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {
namespace {

// One for each unit, on the device.
at::Tensor unit_sums_on_cpu(Term term, const std::vector<const float*>& arrays,
                            const std::vector<Tile>& units) {
  const at::Tensor partials = at::empty({static_cast<int64_t>(units.size())}, at::kDouble);
  auto* sums = partials.mutable_data_ptr<double>();
  for_each_tile(units, [&](int64_t u) {
    const Tile& unit = units[static_cast<size_t>(u)];
    const float* array = arrays[unit.tensor];
    sums[u] = term == Term::square ? unit_sum_of_squares(kernels::GradientType::f32, array, unit)
                                   : kernels::sum_of_magnitudes_cpu(array + unit.offset, unit.count);
  });
  return partials;
}

at::Tensor unit_sums_on_cuda(Term term, const std::vector<const float*>& arrays,
                             const std::vector<Tile>& units, at::Device device) {
  const c10::DeviceGuard guard(device);
  const auto count = static_cast<int64_t>(units.size());
  DeviceBuffer<Tile> tiles;
  DeviceBuffer<kernels::AdamGradient> pointers;
  tiles.host() = units;
  for (const float* array : arrays) pointers.host().push_back({array, 0});
  tiles.send(device);
  pointers.send(device);
  const at::Tensor partials = at::empty({count}, at::TensorOptions().dtype(at::kDouble).device(device));
  auto* sums = partials.mutable_data_ptr<double>();
  const kernels::Stream stream = current_stream(device);
  if (term == Term::square) {
    kernels::sum_of_squares_cuda(kernels::GradientType::f32, tiles.pointer(), count, pointers.pointer(),
                                 /*places=*/nullptr, sums, stream);
  } else {
    kernels::sum_of_magnitudes_cuda(tiles.pointer(), count, pointers.pointer(), sums, stream);
  }
  return partials;
}

}  // namespace

double unit_sum_of_squares(kernels::GradientType type, const void* gradient, const Tile& unit) {
  if (gradient == nullptr) return 0;
  using kernels::GradientType;
  const int64_t bytes = type == GradientType::f64 ? 8 : type == GradientType::f32 ? 4 : 2;
  return kernels::sum_of_squares_cpu(type, static_cast<const char*>(gradient) + unit.offset * bytes,
                                     unit.count);
}

std::vector<double> tensor_sums(Term term, const std::vector<const float*>& arrays,
                                const std::vector<int64_t>& counts, at::Device device, SharedUnits* shared) {
  const std::vector<Tile> units = make_tiles(counts, kReductionUnit);
  at::Tensor of_units = device.is_cpu() ? unit_sums_on_cpu(term, arrays, units)
                                        : unit_sums_on_cuda(term, arrays, units, device);
  if (shared != nullptr) of_units = shared->gather(of_units.view({1, -1}));
  of_units = of_units.cpu();
  const auto* numbers = of_units.const_data_ptr<double>();
  std::vector<double> sums;
  for (const TileRange& own : shared != nullptr ? shared->units_of() : tile_ranges(units, counts.size())) {
    sums.push_back(sum_partials(numbers + own.first, own.count));
  }
  return sums;
}

}  // namespace pacer::detail
