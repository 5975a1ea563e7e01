// Who exchanges 1-bit messages with whom, and how these travel. Workers are the ranks; or, hierarchical, the
// nodes, whose ranks all have the node's numbers, errors and messages, and share the way: each carries one
// slice of every message to its counterparts on the other nodes, where slices are put together again. Or the
// ranks of a node have parts of its numbers: then each has errors and messages for its part, and exchanges
// them with those of the other nodes that have the same part.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>

namespace pacer::detail {

// Messages on their way. Nothing that takes part may be touched before wait(), which makes the host wait, or
// on CUDA the current stream.
class [[nodiscard]] OneBitTransfer {
 public:
  OneBitTransfer() = default;
  OneBitTransfer(Work work, std::function<void()> after) : work_(std::move(work)), after_(std::move(after)) {}
  void wait();
  // Whether wait() would not make the host or the stream wait.
  bool is_done() const { return work_.is_done(); }

 private:
  Work work_;
  std::function<void()> after_;  // what is left to do once they came; may be null
};

class OneBitRoute {
 public:
  // `ranks_have_parts`: each of a worker's ranks has a part of its numbers. Throws InvalidArgument where it
  // is to be hierarchical, but nodes differ in their ranks.
  OneBitRoute(std::shared_ptr<Communicator> world, bool hierarchical, bool ranks_have_parts = false);

  Communicator& world() const { return *world_; }
  int64_t workers() const { return world_->world_size() / ranks_per_worker_; }
  // The one that this rank is, or belongs to.
  int64_t worker() const { return world_->rank() / ranks_per_worker_; }
  // Ranks of one worker.
  int64_t ranks_per_worker() const { return ranks_per_worker_; }
  bool is_by_nodes() const { return ranks_per_worker_ > 1; }
  // The ranks that compare what they exchange, as they have the same: all of them, or those with the same
  // part. Made in the first call, which all ranks make together.
  Communicator& replicas() const { return has_parts_ && is_by_nodes() ? *world_->between_nodes() : *world_; }
  // "rank 3" or "node 1".
  std::string name_of(int64_t worker) const;

  // From now on messages travel in lanes, one for each way, beside what else is on its way: ranks start those
  // of one way in the same order. All ranks call it together. Not by nodes.
  void use_lanes();

  // The size of messages that can be cut, at least `bytes`.
  int64_t message_bytes(int64_t bytes) const;
  // Message k of `messages` (workers() of them, bytes) goes to worker k, number k of `received` is from
  // there.
  OneBitTransfer all_to_all(const at::Tensor& received, const at::Tensor& messages) const;
  // gathered = the messages of all workers.
  OneBitTransfer all_gather(const at::Tensor& gathered, const at::Tensor& message) const;
  // Returns how many bytes this rank sends to others in one all_to_all and one all_gather of such messages.
  int64_t bytes_sent(int64_t message_bytes) const;

 private:
  bool is_sliced() const { return is_by_nodes() && !has_parts_; }
  at::Tensor slices(const at::Tensor& messages) const;
  void put_together(const at::Tensor& messages, const at::Tensor& carried) const;

  std::shared_ptr<Communicator> world_, scatter_lane_, gather_lane_;  // lanes, or null
  int64_t ranks_per_worker_;
  bool has_parts_;
};

}  // namespace pacer::detail
