#include <pacer/optimizers/detail/dtype_table.h>

#include <algorithm>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/kernels/lamb_8bit.h>
#include <pacer/optimizers/detail/tensor_sums.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

void DtypeTable::add(ParameterEntry& entry, size_t table) {
  entry.table = table;
  entry.position = counts_.size();
  const FusedAdamStateFields& state = *entry.state;
  kernels::AdamTensor tensor{};
  tensor.parameter = pointer_of(entry.memory);
  tensor.exp_avg = pointer_of(state.exp_avg());
  tensor.exp_avg_sq = pointer_of(state.exp_avg_sq());
  tensor.max_exp_avg_sq = launch_.amsgrad ? pointer_of(state.max_exp_avg_sq()) : nullptr;
  tensor.master_or_remainder = pointer_of(state.master().defined() ? state.master() : state.remainder());
  tensor.first_element = entry.first_element;
  tensor.exp_avg_scale = pointer_of(state.exp_avg_scale());
  tensor.exp_avg_sq_scale = pointer_of(state.exp_avg_sq_scale());
  if (muon_) muon_->add(entry);
  tensors_.host().push_back(tensor);
  gradients_.host().push_back({nullptr, 0});
  counts_.push_back(entry.range.count);
  averages_.push_back(static_cast<kernels::LambAverage*>(pointer_of(state.trust_average())));
}

void DtypeTable::build_tiles(bool is_paged) {
  is_paged_ = is_paged;
  units_.host() = make_tiles(counts_, kReductionUnit);
  first_units_.assign(1, 0);
  longest_unit_ = 0;
  for (const int64_t count : counts_) {
    longest_unit_ = std::max(longest_unit_, std::min(count, kReductionUnit));
    first_units_.push_back(first_units_.back() + ceil_divide(count, kReductionUnit));
  }
  if (is_paged) return;
  if (muon_) muon_->build();
  if (rule_ == kernels::UpdateRule::lamb) {
    lamb_.emplace(launch_.storage, has_codes_ ? kernels::kLamb8BitLoops : kernels::kLambLoops, counts_,
                  averages_, device_);
  }
  if (device_.is_cpu()) return;  // the units serve as tiles
  tiles_.buffer.host() = make_tiles(counts_, kernels::adam_cuda_block_tile(launch_.storage));
  const int64_t warp_tile = kernels::adam_cuda_warp_tile(launch_.storage);
  tiles_.sort([&](const Tile& tile) { return tile.count > warp_tile; });
}

void DtypeTable::send(bool with_units) {
  if (muon_) muon_->send(gradients_.host());
  if (device_.is_cpu()) return;  // kernels read what the host has
  gradients_.send(device_);
  if (!is_paged_) {
    tensors_.send(device_);
    if (has_rows_) rows_.send(device_);
    tiles_.buffer.send(device_);
  }
  if (with_units) units_.send(device_);
  if (lamb_) lamb_->send();
}

void DtypeTable::sum_of_squares(double* partials, size_t first, size_t tensors) {
  const kernels::GradientType type = gradient_type(launch_.storage);
  const int64_t begin = first_units_[first], end = first_units_[first + tensors];
  if (begin == end) return;
  if (device_.is_cuda()) {
    kernels::sum_of_squares_cuda(type, units_.pointer() + begin, end - begin, gradients_.pointer(),
                                 /*places=*/nullptr, partials + begin, current_stream(device_),
                                 longest_unit_);
    return;
  }
  for_each_tile(units_.host(), begin, end, [&](int64_t i) {
    const Tile& unit = units_.host()[static_cast<size_t>(i)];
    partials[i] = unit_sum_of_squares(type, gradients_.host()[unit.tensor].gradient, unit);
  });
}

void DtypeTable::orthogonalize(const kernels::StepScalars* scalars) {
  if (muon_)
    muon_->orthogonalize({tensors_.pointer(), gradients_.pointer(), scalars}, units_.host(), tiles_.view());
}

void DtypeTable::take_mean(const kernels::StepScalars* scalars) {
  if (muon_) muon_->take_mean({tensors_.pointer(), gradients_.pointer(), scalars});
}

void DtypeTable::step(const kernels::StepScalars* scalars, bool follows_prologue) {
  if (lamb_) {
    return lamb_->step({tensors_.pointer(), gradients_.pointer(), scalars}, tiles_.view(), follows_prologue);
  }
  const kernels::AdamGradient* gradients = gradients_.pointer();
  if (muon_) gradients = muon_->step({tensors_.pointer(), gradients, scalars}, units_.host(), tiles_.view());
  if (device_.is_cuda()) {
    kernels::AdamLaunch launch = launch_;
    launch.follows_prologue = follows_prologue;
    launch.rows = has_rows_ ? rows_.pointer() : nullptr;
    const auto run = launch.loops != nullptr ? launch.loops->cuda : kernels::adam_cuda;
    return run(launch, tiles_.view(), tensors_.pointer(), gradients, scalars, current_stream(device_));
  }
  const auto run = launch_.loops != nullptr ? launch_.loops->cpu : kernels::adam_cpu;
  for_each_tile(units_.host(), [&](int64_t i) {
    const Tile& unit = units_.host()[static_cast<size_t>(i)];
    for_visible_parts(
        unit, has_rows_ ? rows_.host()[unit.tensor] : kernels::RowMask(),
        [&](const Tile& part) { run(launch_, part, tensors_.host().data(), gradients, scalars); });
  });
}

double DtypeTable::trust_ratio(size_t position) const { return lamb_ ? lamb_->ratio(position) : 1; }

}  // namespace pacer::detail
