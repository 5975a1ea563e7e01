// Gradients in the order in which they come, which buckets follow, and those that do not come at all.
#include <pacer/collectives/detail/gradient_bucketer_state.h>

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>

#include <pacer/collectives/detail/gradient_checks.h>
#include <pacer/core/error.h>

namespace pacer {

// Also of parameters that only an earlier backward of the window has reached, or none.
void GradientBucketer::State::send_the_rest() {
  std::vector<std::string> missed;
  is_missed_.assign(parameters_.size(), 0);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!gradients_.is_awaited(i) || parameters_[i].parameter.grad().defined()) continue;
    is_missed_[i] = 1;
    missed.push_back(parameters_[i].name);
  }
  if (!options_.unused_is_zero()) detail::require_all_reached(missed, parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!gradients_.is_awaited(i)) continue;
    if (is_missed_[i] != 0) set_zero(i);
    gradients_.arrive(i);
  }
  send_full_buckets();
  if (options_.unused_is_zero()) tell_missed();
}

// Beside the buckets: what no rank has reached has no gradient, whatever their sum is.
void GradientBucketer::State::tell_missed() {
  const auto count = static_cast<int64_t>(is_missed_.size());
  missed_here_ = at::empty({count}, at::kByte);
  std::copy(is_missed_.begin(), is_missed_.end(), missed_here_.mutable_data_ptr<uint8_t>());
  missed_everywhere_ = at::empty({world_->world_size(), count}, at::kByte);
  missed_work_ = world_->all_gather_host(missed_everywhere_, missed_here_);
}

// From what this rank has missed to what all have.
void GradientBucketer::State::learn_missed() {
  if (!missed_everywhere_.defined()) return;
  std::exchange(missed_work_, {}).wait();
  const at::Tensor all = std::exchange(missed_everywhere_, {});
  const auto* of_ranks = all.const_data_ptr<uint8_t>();
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    for (size_t i = 0; i < is_missed_.size(); ++i) {
      if (of_ranks[static_cast<size_t>(rank) * is_missed_.size() + i] == 0) is_missed_[i] = 0;
    }
  }
}

// Rank 0's order for all. The gradients of this window stay in the old buckets until they are cleared.
void GradientBucketer::State::learn_order() {
  order_is_learned_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {  // those that backward did not reach come last
    if (std::find(arrivals_.begin(), arrivals_.end(), i) == arrivals_.end()) arrivals_.push_back(i);
  }
  const at::Tensor order = at::empty({static_cast<int64_t>(arrivals_.size())}, at::kLong);
  auto* numbers = order.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < arrivals_.size(); ++i) numbers[i] = static_cast<int64_t>(arrivals_[i]);
  const at::Tensor all = at::empty({world_->world_size() * order.numel()}, at::kLong);
  world_->all_gather_host(all, order).wait();
  const auto* first = all.const_data_ptr<int64_t>();
  build({first, first + order.numel()});
}

void GradientBucketer::State::use_order(const std::vector<int64_t>& order) {
  std::vector<int64_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  bool is_permutation = sorted.size() == parameters_.size();
  for (size_t i = 0; is_permutation && i < sorted.size(); ++i) {
    is_permutation = sorted[i] == static_cast<int64_t>(i);
  }
  require(is_permutation, "an order of gradient buckets must name each of the ", parameters_.size(),
          " trained parameters once");
  require(!active_ && arrivals_.empty(), "GradientBucketer::use_order belongs before the first backward");
  build({order.begin(), order.end()});
  order_is_learned_ = true;
}

}  // namespace pacer
