// What a OneBitBucket works out now and then: its tables on a GPU, and the floors of its variance.
#include <pacer/optimizers/detail/onebit_bucket.h>

#include <algorithm>

#include <ATen/ops/where.h>

#include <pacer/core/reduction_order.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/tensor_sums.h>

namespace pacer::detail {

int64_t OneBitBucket::elements() const {
  return shared_units_ ? shared_units_->elements() : rows_.real_elements();
}

void OneBitBucket::make_tables() {
  const auto table_of = [&](kernels::AdamStorage storage) -> OneBitTable& {
    for (OneBitTable& table : tables_) {
      if (table.storage == storage) return table;
    }
    tables_.push_back({storage, {}, {}, {}});
    return tables_.back();
  };
  for (Tile tile : make_tiles(layout_.counts(), kernels::kOneBitBlockTile)) {
    tile.offset += layout_.offset(tile.tensor);
    table_of(tensors_[tile.tensor].storage).tiles.buffer.host().push_back(tile);
  }
  units_of_.host() = shared_units_ ? shared_units_->units_of() : tile_ranges(units_, tensors_.size());
  for (size_t u = 0; u < units_.size(); ++u) {
    OneBitTable& table = table_of(tensors_[units_[u].tensor].storage);
    table.units.host().push_back(units_[u]);
    table.unit_places.host().push_back(static_cast<uint32_t>(u));
  }
  for (OneBitTable& table : tables_) {
    table.tiles.sort([](const Tile& tile) { return tile.count > kernels::kOneBitWarpTile; });
    table.tiles.buffer.send(device_);
    table.units.send(device_);
    table.unit_places.send(device_);
  }
  all_units_.host() = units_;
  counts_.host() = shared_units_ ? shared_units_->counts() : layout_.counts();
  gradients_.host().resize(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    variances_.host().push_back({variance_.const_data_ptr<float>() + layout_.offset(i), 0});
  }
  all_units_.send(device_);
  counts_.send(device_);
  units_of_.send(device_);
  variances_.send(device_);
}

void OneBitBucket::set_floors(const kernels::GradientCheck* check) {
  if (device_.is_cpu()) return set_floors_on_cpu();
  const kernels::Stream stream = current_stream(device_);
  kernels::sum_of_magnitudes_cuda(all_units_.pointer(), static_cast<int64_t>(units_.size()),
                                  variances_.pointer(), partials_.mutable_data_ptr<double>(), stream);
  const at::Tensor partials = all_partials();
  kernels::OneBitFloors work{};
  work.partials = partials.const_data_ptr<double>();
  work.units = units_of_.pointer();
  work.counts = counts_.pointer();
  work.tensors = static_cast<int64_t>(tensors_.size());
  work.elements = elements();
  work.share = variance_floor_;
  work.sums = sums_.mutable_data_ptr<double>();
  work.total = total_.mutable_data_ptr<double>();
  work.floors = floors_.mutable_data_ptr<float>();
  onebit_floors_cuda(work, control(check), stream);
}

void OneBitBucket::set_floors_on_cpu() {
  const kernels::FullDenormals full_denormals;
  const auto* variance = variance_.const_data_ptr<float>();
  std::vector<const float*> arrays;
  for (size_t i = 0; i < tensors_.size(); ++i) arrays.push_back(variance + layout_.offset(i));
  const std::vector<double> sums =
      tensor_sums(Term::magnitude, arrays, layout_.counts(), device_, shared_units_.get());
  const std::vector<int64_t>& counts = shared_units_ ? shared_units_->counts() : layout_.counts();
  double total = 0;
  for (const double sum : sums) total += sum;
  *total_.mutable_data_ptr<double>() = total;
  std::copy(sums.begin(), sums.end(), sums_.mutable_data_ptr<double>());
  auto* floors = floors_.mutable_data_ptr<float>();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    floors[i] = kernels::variance_floor(variance_floor_, sums[i], counts[i], total, elements());
  }
}

void OneBitBucket::raise_floors(const at::Tensor& mean_variance) {
  const at::Tensor of_mean = mean_variance.mul(variance_floor_).neg().to(at::kFloat);
  floors_.copy_(at::where(sums_.gt(0), floors_, of_mean));
}

}  // namespace pacer::detail
