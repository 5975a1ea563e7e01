// What MuonKernels keep between steps: which matrices are products of one batch, which of them are this rank's, and
// where directions and results are.
#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/tile.h>
#include <pacer/optimizers/detail/direction_exchange.h>
#include <pacer/optimizers/detail/muon_kernels.h>
#include <pacer/optimizers/detail/product_share.h>
#include <pacer/optimizers/detail/shared_sums.h>

namespace pacer::detail {
namespace {

// So many elements at least lie between the parts of two matrices.
constexpr int64_t kPartAlignment = 128;

}  // namespace

at::ScalarType MuonKernels::type_of_products() const {
  if (storage_ == kernels::AdamStorage::f64) return at::kDouble;
  const bool in_bf16 = settings_.precision == MuonPrecision::automatic
                           ? device_.is_cuda()
                           : settings_.precision == MuonPrecision::bf16;
  return in_bf16 ? at::kBFloat16 : at::kFloat;
}

at::ScalarType MuonKernels::type_of_rows() const {
  return storage_ == kernels::AdamStorage::f64 ? at::kDouble : at::kFloat;
}

void MuonKernels::add(const ParameterEntry& entry) {
  const bool is_part = entry.range.is_part();  // of all matrices, or of none
  const at::Tensor like =
      is_part ? at::empty(entry.parameter.sizes(), entry.memory.options().device(at::kMeta)) : entry.memory;
  auto batch = std::find_if(batches_.begin(), batches_.end(), [&](const Batch& other) {
    return other.like.sizes() == like.sizes() && same_layout(other.like, like);
  });
  if (batch == batches_.end()) {
    batch = batches_.emplace(batch);
    batch->like = like;
  }
  batch->members.push_back(matrices_++);
  exchanged_.push_back(entry.exchanged.value_or(0));
  row_moments_.push_back(entry.state->row_moment());
  if (is_part) parts_.push_back({entry.range.count, entry.range.bounds});
}

MuonKernels::Piece MuonKernels::piece_of(const Batch& batch) const {
  return {batch.like.size(0) / settings_.split, batch.like.numel() / batch.like.size(0)};
}

// Of a matrix: how many multiplications its products are, but for the number of iterations.
double MuonKernels::cost_of(const Batch& batch) const {
  const auto [rows, columns] = piece_of(batch);
  const auto smaller = static_cast<double>(std::min(rows, columns)),
             larger = static_cast<double>(std::max(rows, columns));
  return static_cast<double>(settings_.split) * smaller * smaller * (2 * larger + smaller);
}

// The dearest first, so that what is left over of others evens the load out.
void MuonKernels::deal_out() {
  std::stable_sort(batches_.begin(), batches_.end(),
                   [this](const Batch& a, const Batch& b) { return cost_of(a) > cost_of(b); });
  for (Batch& batch : batches_) {
    const auto rank = static_cast<size_t>(share_->ranks().rank());
    batch.bounds = share_->deal(static_cast<int64_t>(batch.members.size()), cost_of(batch));
    batch.begin = batch.bounds[rank];
    batch.end = batch.bounds[rank + 1];
    for (int64_t k = batch.begin; k < batch.end; ++k)
      makes_direction_[batch.members[static_cast<size_t>(k)]] = 1;
  }
}

void MuonKernels::build() {
  makes_direction_.assign(matrices_, parts_.empty() ? 0 : 1);
  own_gradients_.host().assign(share_ ? matrices_ : 0, {nullptr, 0});
  directions_.host().assign(matrices_, nullptr);
  results_.assign(matrices_, nullptr);
  updates_.host().assign(matrices_, {nullptr, 0});
  for (Batch& batch : batches_) batch.end = static_cast<int64_t>(batch.members.size());
  if (share_ != nullptr) deal_out();
  for (Batch& batch : batches_) make_memory(batch);
  if (!parts_.empty()) make_parts();
}

// Zeros, as the first step may leave matrices out.
void MuonKernels::make_memory(Batch& batch) {
  const auto options = at::TensorOptions().device(device_);
  const auto count = static_cast<int64_t>(batch.members.size());
  if (!parts_.empty()) batch.first_direction = batch.begin;
  std::vector<int64_t> sizes = batch.like.sizes().vec(), strides = batch.like.strides().vec();
  sizes.insert(sizes.begin(), parts_.empty() ? count : batch.end - batch.begin);
  strides.insert(strides.begin(), batch.like.numel());
  const auto make = [&](at::ScalarType dtype) {
    return at::zeros({sizes[0] * batch.like.numel()}, options.dtype(dtype)).as_strided(sizes, strides);
  };
  batch.directions = make(type_of_products());
  const at::ScalarType of_parameters = batch.like.scalar_type();
  const bool has_results = parts_.empty() && of_parameters != type_of_products();
  batch.results = has_results ? make(of_parameters) : batch.directions;
  if (settings_.normalizes_rows) {
    batch.fresh = at::zeros({count, batch.like.size(0)}, options.dtype(type_of_rows()));
    batch.first_rows = static_cast<int64_t>(rows_.host().size());
  }
  for (int64_t k = 0; k < count; ++k) {
    const size_t matrix = batch.members[static_cast<size_t>(k)];
    if (parts_.empty()) {
      directions_.host()[matrix] = batch.directions[k].mutable_data_ptr();
      results_[matrix] = batch.results[k].const_data_ptr();
    }
    if (exchange_ != nullptr) {
      own_.push_back(batch.directions[k]);
      shared_.push_back(exchange_->direction(exchanged_[matrix]));
    }
    if (!settings_.normalizes_rows) continue;
    rows_.host().push_back({static_cast<int64_t>(matrix), row_moments_[matrix].mutable_data_ptr(),
                            batch.fresh[k].mutable_data_ptr(), batch.like.size(0)});
  }
}

void MuonKernels::make_parts() {
  std::vector<int64_t> offsets = {0};
  for (const Part& part : parts_) offsets.push_back(offsets.back() + round_up(part.count, kPartAlignment));
  const auto options = at::TensorOptions().device(device_);
  direction_parts_ = at::zeros({offsets.back()}, options.dtype(type_of_products()));
  const at::ScalarType of_parameters = batches_.front().like.scalar_type();
  result_parts_ = of_parameters == type_of_products()
                      ? direction_parts_
                      : at::zeros({offsets.back()}, options.dtype(of_parameters));
  for (Batch& batch : batches_) {
    const int64_t elements = batch.like.numel();
    for (size_t k = 0; k < batch.members.size(); ++k) {
      const size_t matrix = batch.members[k];
      const auto [count, bounds] = parts_[matrix];
      const at::Tensor own = direction_parts_.narrow(0, offsets[matrix], count);
      directions_.host()[matrix] = own.mutable_data_ptr();
      results_[matrix] = result_parts_.narrow(0, offsets[matrix], count).const_data_ptr();
      const int owner = owner_of(batch.bounds, static_cast<int64_t>(k));
      const bool is_here = owner == share_->ranks().rank();
      batch.parts.add(
          share_->ranks(), own, bounds, owner,
          is_here ? batch.directions[static_cast<int64_t>(k) - batch.begin].view({elements}) : at::Tensor());
    }
  }
}

}  // namespace pacer::detail
