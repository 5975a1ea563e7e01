#include <pacer/optimizers/detail/onebit_kernels.h>

#include <algorithm>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/parameter_entry.h>
#include <pacer/optimizers/detail/tensor_sums.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

using kernels::AdamStorage;
using kernels::OneBitAdamWork;
using kernels::OneBitControl;

OneBitKernels::OneBitKernels(const std::vector<OneBitTensor>& tensors, const kernels::OneBitLayout& layout,
                             at::Device device, const std::shared_ptr<Communicator>& shard_ranks)
    : device_(device),
      layout_(layout),
      rows_(layout_.rows()),
      units_(make_tiles(layout_.counts(), kReductionUnit)) {
  tensors_.host().resize(tensors.size());
  const auto doubles = at::TensorOptions().dtype(at::kDouble).device(device);
  partials_ = at::empty({static_cast<int64_t>(units_.size())}, doubles);
  sums_ = at::empty({static_cast<int64_t>(tensors.size())}, doubles);
  if (shard_ranks) shared_units_ = std::make_unique<SharedUnits>(shard_ranks, bounds_of(tensors), device_);
  if (device_.is_cuda()) make_tables(tensors);
}

int64_t OneBitKernels::step_groups() const {
  int64_t last = 0;
  for (const kernels::OneBitAdamTensor& tensor : tensors_.host()) last = std::max(last, tensor.scalars);
  return last + 1;
}

int64_t OneBitKernels::elements() const {
  return shared_units_ ? shared_units_->elements() : rows_.real_elements();
}

// Of whole tensors, here and on other ranks.
at::Tensor OneBitKernels::all_partials() const {
  return shared_units_ ? shared_units_->gather(partials_.view({1, -1})).view({-1}) : partials_;
}

void OneBitKernels::make_tables(const std::vector<OneBitTensor>& tensors) {
  const auto table_of = [&](AdamStorage storage) -> Table& {
    for (Table& table : tables_) {
      if (table.storage == storage) return table;
    }
    tables_.push_back({storage, {}, {}, {}});
    return tables_.back();
  };
  for (Tile tile : make_tiles(layout_.counts(), kernels::kOneBitBlockTile)) {
    tile.offset += layout_.offset(tile.tensor);
    table_of(tensors[tile.tensor].storage).tiles.buffer.host().push_back(tile);
  }
  units_of_.host() = shared_units_ ? shared_units_->units_of() : tile_ranges(units_, tensors.size());
  for (size_t u = 0; u < units_.size(); ++u) {
    Table& table = table_of(tensors[units_[u].tensor].storage);
    table.units.host().push_back(units_[u]);
    table.unit_places.host().push_back(static_cast<uint32_t>(u));
  }
  for (Table& table : tables_) {
    table.tiles.sort([](const Tile& tile) { return tile.count > kernels::kOneBitWarpTile; });
    table.tiles.buffer.send(device_);
    table.units.send(device_);
    table.unit_places.send(device_);
  }
  all_units_.host() = units_;
  counts_.host() = shared_units_ ? shared_units_->counts() : layout_.counts();
  gradients_.host().resize(tensors.size());
  variances_.host().resize(tensors.size());
  all_units_.send(device_);
  counts_.send(device_);
  units_of_.send(device_);
}

void OneBitKernels::set_tensor(size_t i, const kernels::OneBitAdamTensor& tensor) {
  kernels::OneBitAdamTensor& current = tensors_.host()[i];
  if (current == tensor) return;
  current = tensor;
  tensors_.mark_changed();
  if (device_.is_cpu()) return;
  gradients_.host()[i].gradient = tensor.gradient;
  gradients_.mark_changed();
}

void OneBitKernels::send() {
  tensors_.send(device_);
  gradients_.send(device_);
}

template <class F>
void OneBitKernels::for_units(const F& f) const {
  at::parallel_for(0, rows_.units(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) f(unit);
  });
}

kernels::OneBitAdamRows OneBitKernels::rows_of(const OneBitAdamWork& work) const {
  return {work, rows_.pieces.data(), rows_.first.data(), rows_.count(), rows_.extent};
}

// ---- Sums ----

void OneBitKernels::sum_of_squares(double* sum) {
  auto* partials = partials_.mutable_data_ptr<double>();
  if (device_.is_cpu()) {
    for_each_tile(units_, [&](int64_t u) {
      const Tile& unit = units_[static_cast<size_t>(u)];
      const kernels::OneBitAdamTensor& tensor = tensors_.host()[unit.tensor];
      partials[u] = unit_sum_of_squares(gradient_type(tensor.storage), tensor.gradient, unit);
    });
    const at::Tensor all = all_partials();
    *sum = sum_partials(all.const_data_ptr<double>(), all.numel());
    return;
  }
  const kernels::Stream stream = current_stream(device_);
  for (const Table& table : tables_) {
    kernels::sum_of_squares_cuda(
        gradient_type(table.storage), table.units.pointer(), static_cast<int64_t>(table.units.host().size()),
        gradients_.pointer(), tables_.size() == 1 ? nullptr : table.unit_places.pointer(), partials, stream);
  }
  const at::Tensor all = all_partials();
  kernels::sum_partials_cuda(all.const_data_ptr<double>(), all.numel(), sum, stream);
}

void OneBitKernels::floors(const at::Tensor& variance, double share, const at::Tensor& floors,
                           const at::Tensor& total, const OneBitControl& control) {
  auto* variances = variance.mutable_data_ptr<float>();
  if (device_.is_cpu()) {
    return floors_on_cpu(variances, share, floors.mutable_data_ptr<float>(),
                         total.mutable_data_ptr<double>());
  }
  for (size_t i = 0; i < variances_.host().size(); ++i) {
    const void* of_tensor = variances + layout_.offset(i);
    if (variances_.host()[i].gradient == of_tensor) continue;
    variances_.host()[i].gradient = of_tensor;
    variances_.mark_changed();
  }
  variances_.send(device_);
  const kernels::Stream stream = current_stream(device_);
  kernels::sum_of_magnitudes_cuda(all_units_.pointer(), static_cast<int64_t>(units_.size()),
                                  variances_.pointer(), partials_.mutable_data_ptr<double>(), stream);
  const at::Tensor partials = all_partials();
  kernels::OneBitFloors work{};
  work.partials = partials.const_data_ptr<double>();
  work.units = units_of_.pointer();
  work.counts = counts_.pointer();
  work.tensors = static_cast<int64_t>(layout_.counts().size());
  work.elements = elements();
  work.share = share;
  work.sums = sums_.mutable_data_ptr<double>();
  work.total = total.mutable_data_ptr<double>();
  work.floors = floors.mutable_data_ptr<float>();
  onebit_floors_cuda(work, control, stream);
}

void OneBitKernels::floors_on_cpu(const float* variance, double share, float* floors, double* total) const {
  const kernels::FullDenormals full_denormals;
  const size_t tensors = layout_.counts().size();
  std::vector<const float*> arrays;
  for (size_t i = 0; i < tensors; ++i) arrays.push_back(variance + layout_.offset(i));
  const std::vector<double> sums =
      tensor_sums(Term::magnitude, arrays, layout_.counts(), device_, shared_units_.get());
  const std::vector<int64_t>& counts = shared_units_ ? shared_units_->counts() : layout_.counts();
  *total = 0;
  for (const double sum : sums) *total += sum;
  std::copy(sums.begin(), sums.end(), sums_.mutable_data_ptr<double>());
  for (size_t i = 0; i < tensors; ++i) {
    floors[i] = kernels::variance_floor(share, sums[i], counts[i], *total, elements());
  }
}

// ---- The step ----

void OneBitKernels::start(OneBitExchange& exchange, const OneBitAdamWork& work,
                          const kernels::GradientCheck* check, int64_t step) const {
  const kernels::OneBitAdamRows rows = rows_of(work);
  const kernels::OneBitStorage storage{tables_.size() == 1,
                                       tables_.empty() ? AdamStorage::f32 : tables_.front().storage};
  OneBitInput input;
  input.source =
      work.momentum_scales == nullptr ? kernels::onebit_momentum_row : kernels::onebit_scaled_momentum_row;
  input.context = &rows;
  input.enqueue = [&](const auto& side, const auto& control, kernels::Stream stream) {
    onebit_compress_momentum_cuda(side, work, storage, control, stream);
  };
  input.check = check;
  exchange.start(input, step);
}

void OneBitKernels::dense_momentum(const OneBitAdamWork& work, float* momentum, bool refresh,
                                   const OneBitControl& control) const {
  if (device_.is_cpu()) {
    const kernels::OneBitAdamRows rows = rows_of(work);
    for_units([&](int64_t unit) {
      onebit_dense_momentum_cpu(rows, unit, momentum);
      if (refresh) onebit_refresh_cpu(rows, unit);
    });
    return;
  }
  for (const Table& table : tables_) {
    onebit_dense_momentum_cuda(table.storage, table.tiles.view(), work, momentum, refresh, control,
                               current_stream(device_));
  }
}

void OneBitKernels::update(const OneBitAdamWork& work, bool dense, const OneBitControl& control) const {
  if (device_.is_cpu()) {
    const kernels::OneBitAdamRows rows = rows_of(work);
    for_units([&](int64_t unit) { onebit_update_cpu(rows, unit); });
    return;
  }
  for (const Table& table : tables_) {
    onebit_update_cuda(table.storage, table.tiles.view(), work, dense, control, current_stream(device_));
  }
}

at::Tensor OneBitKernels::decode(const OneBitAdamWork& work, const OneBitControl& control) const {
  const at::Tensor momentum =
      at::zeros({layout_.length()}, at::TensorOptions().dtype(at::kFloat).device(device_));
  auto* to = momentum.mutable_data_ptr<float>();
  if (device_.is_cuda()) {
    onebit_decode_cuda(work.bits, layout_.length(), to, control, current_stream(device_));
    return momentum;
  }
  const kernels::OneBitAdamRows rows = rows_of(work);
  float values[kernels::kOneBitRow];
  for (int64_t row = 0; row < rows.rows; ++row) {
    const int64_t begin = row * kernels::kOneBitRow;
    onebit_read_momentum(rows, row, std::min(kernels::kOneBitRow, rows.extent - begin), values);
    for (int64_t p = rows.first[row]; p < rows.first[row + 1]; ++p) {
      const kernels::OneBitPiece& piece = rows.pieces[p];
      std::copy_n(values + (piece.position - begin), piece.count, to + piece.position);
    }
  }
  return momentum;
}

}  // namespace pacer::detail
