#include <pacer/optimizers/detail/shared_sums.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/reduction_order.h>

namespace pacer::detail {

int owner_of(const std::vector<int64_t>& bounds, int64_t element) {
  return static_cast<int>(std::upper_bound(bounds.begin(), bounds.end(), element) - bounds.begin()) - 1;
}

SharedSums::SharedSums(std::shared_ptr<Communicator> ranks, at::Device device)
    : ranks_(std::move(ranks)), device_(device), units_of_(static_cast<size_t>(ranks_->world_size())) {}

int64_t SharedSums::add_unit(int rank) {
  std::vector<int64_t>& of_rank = units_of_[static_cast<size_t>(rank)];
  of_rank.push_back(units_++);
  return static_cast<int64_t>(of_rank.size()) - 1;
}

int64_t SharedSums::own() const {
  return static_cast<int64_t>(units_of_[static_cast<size_t>(ranks_->rank())].size());
}

void SharedSums::prepare(int64_t rows) {
  if (order_.defined() && order_.size(0) == rows) return;
  for (const auto& of_rank : units_of_) width_ = std::max(width_, static_cast<int64_t>(of_rank.size()));
  sent_ = at::zeros({rows, width_}, at::TensorOptions().dtype(at::kDouble).device(device_));
  all_ = at::empty({ranks_->world_size(), rows, width_}, sent_.options());
  const at::Tensor order = at::empty({rows, units_}, at::kLong);
  auto* place_of = order.mutable_data_ptr<int64_t>();
  for (size_t rank = 0; rank < units_of_.size(); ++rank) {
    for (int64_t row = 0; row < rows; ++row) {
      int64_t place = (static_cast<int64_t>(rank) * rows + row) * width_;
      for (const int64_t unit : units_of_[rank]) place_of[row * units_ + unit] = place++;
    }
  }
  order_ = order.to(device_);
}

at::Tensor SharedSums::gather(const at::Tensor& sums) {
  prepare(sums.size(0));
  sent_.narrow(1, 0, own()).copy_(sums);
  ranks_->all_gather(all_.view({-1}), sent_.view({-1}), CollectiveOptions().agreed(true)).wait();
  return all_.view({-1}).index_select(0, order_.view({-1})).view(order_.sizes());
}

SharedUnits::SharedUnits(std::shared_ptr<Communicator> ranks, const std::vector<std::vector<int64_t>>& bounds,
                         at::Device device)
    : sums_(std::move(ranks), device) {
  for (const std::vector<int64_t>& of_tensor : bounds) {
    const int64_t first = sums_.all();
    for (int64_t begin = 0; begin < of_tensor.back(); begin += kReductionUnit) {
      sums_.add_unit(owner_of(of_tensor, begin));
    }
    units_of_.push_back({first, sums_.all() - first});
    counts_.push_back(of_tensor.back());
  }
}

int64_t SharedUnits::elements() const { return std::accumulate(counts_.begin(), counts_.end(), int64_t{0}); }

}  // namespace pacer::detail
