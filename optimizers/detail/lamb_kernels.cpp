#include <pacer/optimizers/detail/lamb_kernels.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <pacer/core/reduction_order.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

using kernels::LambRatio;

LambKernels::LambKernels(kernels::AdamStorage storage, const kernels::LambLoops& loops,
                         const std::vector<int64_t>& counts, std::vector<kernels::LambAverage*> averages,
                         at::Device device)
    : storage_(storage), loops_(loops), device_(device) {
  averages_.host() = std::move(averages);
  std::vector<Tile>& units = units_.buffer.host();
  units = make_tiles(counts, kReductionUnit);
  if (device.is_cuda()) {
    units_.sort([&](const Tile& unit) { return counts[unit.tensor] > kernels::kLambWarpUnit; });
  }
  units_of_.host() = tile_ranges(units, counts.size());
  const auto doubles = at::TensorOptions().dtype(at::kDouble).device(device);
  sums_ = at::empty({2, static_cast<int64_t>(units.size())}, doubles);
  static_assert(sizeof(LambRatio) == 2 * sizeof(double));
  ratios_ = at::ones({static_cast<int64_t>(counts.size()), 2}, doubles);
}

void LambKernels::share_with(const std::shared_ptr<Communicator>& ranks,
                             const std::vector<std::vector<int64_t>>& bounds) {
  shared_units_ = std::make_unique<SharedUnits>(ranks, bounds, device_);
  const std::vector<TileRange> own_units = std::exchange(units_of_.host(), shared_units_->units_of());
  std::vector<int64_t> in_order;
  for (size_t t = 0; t < bounds.size(); ++t) {
    if (bounds[t].back() == 0) continue;
    for (int64_t u = 0; u < own_units[t].count; ++u) in_order.push_back(own_units[t].first + u);
  }
  in_order_ = at::tensor(in_order, at::kLong).to(device_);
}

void LambKernels::send() {
  units_.buffer.send(device_);
  units_of_.send(device_);
  averages_.send(device_);
}

kernels::LambPartials LambKernels::partials() const {
  auto* sums = static_cast<double*>(sums_.mutable_data_ptr());
  return {sums, sums + sums_.size(1)};
}

LambRatio* LambKernels::ratios() const { return static_cast<LambRatio*>(ratios_.mutable_data_ptr()); }

kernels::LambPartials LambKernels::gathered() {
  if (!shared_units_) return partials();
  all_sums_ = shared_units_->gather(sums_.index_select(1, in_order_));
  auto* sums = static_cast<double*>(all_sums_.mutable_data_ptr());
  return {sums, sums + all_sums_.size(1)};
}

void LambKernels::step_on_cpu(const Step& step) {
  const std::vector<Tile>& units = units_.buffer.host();
  kernels::LambPartials sums = partials();
  LambRatio* const ratio = ratios();
  for_each_tile(units, [&](int64_t i) {
    loops_.moments_cpu(storage_, units[i], step.tensors, step.gradients, step.scalars, sums.parameter + i,
                       sums.update + i);
  });
  sums = gathered();
  constexpr int64_t kTensorsAtOnce = 256;
  at::parallel_for(0, ratios_.size(0), kTensorsAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernels::lamb_ratio_cpu(storage_, units_of_.host()[t], step.gradients[t], step.scalars, sums, ratio + t,
                              averages_.host()[static_cast<size_t>(t)]);
    }
  });
  for_each_tile(units, [&](int64_t i) {
    loops_.update_cpu(storage_, units[i], step.tensors, step.gradients, step.scalars, ratio);
  });
}

void LambKernels::step(const Step& step, const kernels::AdamTiles& tiles, bool follows_prologue) {
  if (device_.is_cpu()) return step_on_cpu(step);
  step_on_cuda(step, tiles, follows_prologue);
}

void LambKernels::step_on_cuda(const Step& step, const kernels::AdamTiles& tiles, bool follows_prologue) {
  kernels::LambWork work{units_.view(), tiles,    units_of_.pointer(), ratios_.size(0),
                         partials(),    ratios(), averages_.pointer()};
  const auto run = [&](kernels::LambLaunches which) {
    loops_.cuda(storage_, work, step.tensors, step.gradients, step.scalars, follows_prologue,
                current_stream(device_), which);
  };
  if (!shared_units_) return run(kernels::LambLaunches::all);
  run(kernels::LambLaunches::moments);
  work.partials = gathered();
  run(kernels::LambLaunches::ratio_and_update);
}

double LambKernels::ratio(size_t position) const {
  return ratios_.select(0, static_cast<int64_t>(position)).select(0, 0).item<double>();
}

}  // namespace pacer::detail
