#include <pacer/optimizers/detail/shared_sums.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace pacer::detail {

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
  if (order_.defined()) return;
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

}  // namespace pacer::detail
