#include <pacer/compression/detail/onebit_route.h>

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>
#include <pacer/core/tile.h>

namespace pacer::detail {
namespace {

constexpr int64_t kSliceAlignment = 16;  // bytes

CollectiveOptions agreed() { return CollectiveOptions().agreed(true); }

}  // namespace

OneBitRoute::OneBitRoute(std::shared_ptr<Communicator> world, bool hierarchical, bool ranks_have_parts)
    : world_(std::move(world)),
      ranks_per_worker_(hierarchical ? world_->ranks_per_node() : 1),
      has_parts_(ranks_have_parts) {
  require(
      ranks_per_worker_ > 0,
      "hierarchical(true) makes each node one worker, so that all nodes need as many ranks, which follow "
      "one another; this run's do not: start as many ranks on every machine, machine by machine, or leave "
      "hierarchical out");
}

void OneBitTransfer::wait() {
  work_.wait();
  if (after_) after_();
}

// Their first messages may hold up the host, which backward must not.
void OneBitRoute::use_lanes() {
  if (world_->world_size() == 1) return;
  scatter_lane_ = world_->lane("momentum there");
  gather_lane_ = world_->lane("momentum back");
  const auto options = at::TensorOptions().dtype(at::kByte).device(world_->device());
  const at::Tensor all = at::zeros({workers()}, options), other = at::empty_like(all);
  scatter_lane_->all_to_all(other, all, agreed()).wait();
  gather_lane_->all_gather(all, other.narrow(0, 0, 1), agreed()).wait();
}

std::string OneBitRoute::name_of(int64_t worker) const {
  return concatenate(is_by_nodes() ? "node " : "rank ", worker);
}

int64_t OneBitRoute::message_bytes(int64_t bytes) const {
  return is_sliced() ? round_up(bytes, kSliceAlignment * ranks_per_worker_) : bytes;
}

// [workers, ranks_per_worker, bytes of a slice]
at::Tensor OneBitRoute::slices(const at::Tensor& messages) const {
  return messages.view({workers(), ranks_per_worker_, -1});
}

OneBitTransfer OneBitRoute::all_to_all(const at::Tensor& received, const at::Tensor& messages) const {
  if (!is_sliced())
    return {(scatter_lane_ ? *scatter_lane_ : replicas()).all_to_all(received, messages, agreed()), nullptr};
  const at::Tensor own = slices(messages).select(1, world_->rank() % ranks_per_worker_).contiguous();
  const at::Tensor carried = at::empty(own.sizes(), own.options());
  Work work = world_->between_nodes()->all_to_all(carried, own, agreed());
  return {std::move(work), [=, route = *this] { route.put_together(received, carried); }};
}

OneBitTransfer OneBitRoute::all_gather(const at::Tensor& gathered, const at::Tensor& message) const {
  if (!is_sliced())
    return {(gather_lane_ ? *gather_lane_ : replicas()).all_gather(gathered, message, agreed()), nullptr};
  const at::Tensor own = message.view({ranks_per_worker_, -1}).select(0, world_->rank() % ranks_per_worker_);
  const at::Tensor carried = at::empty({workers(), own.numel()}, own.options());
  Work work = world_->between_nodes()->all_gather(carried, own, agreed());
  return {std::move(work), [=, route = *this] { route.put_together(gathered, carried); }};
}

// Each rank of the node has carried one slice of every message.
void OneBitRoute::put_together(const at::Tensor& messages, const at::Tensor& carried) const {
  const at::Tensor all = at::empty({ranks_per_worker_, carried.size(0), carried.size(1)}, carried.options());
  world_->node()->all_gather(all, carried, agreed()).wait();
  slices(messages).copy_(all.permute({1, 0, 2}));
}

int64_t OneBitRoute::bytes_sent(int64_t message_bytes) const {
  const int64_t slices = is_sliced() ? ranks_per_worker_ : 1, slice = message_bytes / slices;
  const int64_t between = (workers() - 1) * slice, inside = (slices - 1) * workers() * slice;
  return 2 * (between + inside);
}

}  // namespace pacer::detail
