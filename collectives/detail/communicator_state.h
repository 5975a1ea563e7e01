// What the public Communicator holds: transports, what its rank shares with its other communicators, and the
// groups that were split off. Every operation goes through start(), every failure through fail().
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/agreement_message.h>
#include <pacer/collectives/detail/gather.h>
#include <pacer/collectives/detail/operation_queue.h>
#include <pacer/collectives/detail/transport.h>
#include <pacer/collectives/detail/world.h>

namespace pacer::detail {

class CommunicatorState : public std::enable_shared_from_this<CommunicatorState> {
 public:
  // Makes the state of a group or lane. `name` is for messages. `counted_as` is for counters, which outlive
  // the group: groups that are made again and again must not each have their own. `ranks` are their numbers
  // in the world.
  CommunicatorState(Connection connection, CommunicatorOptions options, std::shared_ptr<World> world,
                    std::string name, std::string counted_as, std::vector<int> ranks);
  // Makes the state of all ranks; both names are empty.
  CommunicatorState(Connection connection, CommunicatorOptions options, std::shared_ptr<World> world,
                    std::vector<int> ranks)
      : CommunicatorState(std::move(connection), std::move(options), std::move(world), "", "",
                          std::move(ranks)) {}

  const Connection& connection() const { return connection_; }
  const CommunicatorOptions& options() const { return options_; }
  const std::shared_ptr<World>& world() const { return world_; }
  const std::string& name() const { return name_; }
  int rank_in_world(int rank) const { return ranks_.at(static_cast<size_t>(rank)); }
  Transport::Milliseconds timeout_of(const CollectiveOptions& options) const {
    return options.timeout().value_or(options_.timeout());
  }
  // Whether a sum is put together in rank order by calls of its own.
  bool needs_ordered_sum(const CollectiveOptions& options) const {
    return options.ordered_sum().value_or(options_.ordered_sum()) && !connection_.data->sums_in_rank_order();
  }

  // Counts a call that sends `bytes` from here, and starts it.
  Work start(const char* operation, int64_t bytes, const CollectiveOptions& options, TransportCalls calls) {
    return start_on(operations_, operation, bytes, options, std::move(calls));
  }
  // Starts output = the inputs of all ranks, in host memory, independent of the operations above.
  Work start_gather(const at::Tensor& output, const at::Tensor& input, const CollectiveOptions& options);
  // `own` of all ranks, byte for byte, in their order. Blocks.
  template <class T>
  std::vector<T> gather(const T& own, const CollectiveOptions& options) {
    return gather_values(own, connection_.world_size, [&](const at::Tensor& all, const at::Tensor& one) {
      start_gather(all, one, options).wait();
    });
  }
  // Refuses, on every rank, calls that differ between the ranks, unless nobody wants that compared.
  void compare(CallRecord record, const CollectiveOptions& options);
  // The group with the ranks of the same `color`, in the order of `key`; nothing where `color` is negative.
  std::shared_ptr<CommunicatorState> split(int color, int key, const std::string& name);
  // The same, made once and kept under its name.
  std::shared_ptr<Communicator> kept(const std::string& name, int color);
  // Exchanges a byte with the ranks before and after this one. NCCL connects two ranks at their first
  // messages, for which the host waits on both sides: messages that cross must not be the first.
  void connect_neighbours();

  // Records the failure of an operation, ends all others, asks who is still there, and throws.
  [[noreturn]] void fail(const std::string& operation, int64_t sequence, const std::string& cause);

 private:
  Work start_on(OperationQueue& queue, const char* operation, int64_t bytes, const CollectiveOptions& options,
                TransportCalls calls);

  const Connection connection_;
  const CommunicatorOptions options_;
  const std::shared_ptr<World> world_;
  const std::string name_, counted_as_;
  const std::vector<int> ranks_;
  std::mutex mutex_;  // for what follows, up to the queues
  int64_t sequence_ = 0;
  int64_t collectives_ = 0;  // compared calls
  int splits_ = 0;
  std::map<std::string, std::shared_ptr<Communicator>> kept_;
  OperationQueue operations_, messages_;
};

}  // namespace pacer::detail
