// How bytes get from rank to rank: the interface that Gloo, NCCL and threads of one process implement. It
// knows nothing of deadlines' consequences, counters or checks; those are the Communicator's.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/message.h>

namespace pacer::detail {

class RankHealth;

// An operation was not done by its deadline.
class TransportTimeout : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One operation under way. Destroying it without wait() is allowed at any time.
class TransportWork {
 public:
  virtual ~TransportWork() = default;
  // Host memory: returns when the operation is done. CUDA: makes the current stream wait for it and returns
  // at once. Throws TransportTimeout, or any std::exception where the operation is known to have failed.
  virtual void wait() = 0;
  // Never blocks. True also where it failed; wait() then says why.
  virtual bool is_done() = 0;
};
using TransportWorkPtr = std::unique_ptr<TransportWork>;

// Operations that are waited for together.
TransportWorkPtr joined(std::vector<TransportWorkPtr> works);

// Every rank starts the same operations in the same order. Tensors are contiguous, on device(), not empty,
// and stay untouched until the work is waited for (the work holds them). On CUDA an operation begins once
// the work enqueued so far on the caller's current stream is done. Every call may throw std::exception.
class Transport {
 public:
  using Milliseconds = std::chrono::milliseconds;

  virtual ~Transport() = default;
  virtual std::string name() const = 0;  // for people, for example "NCCL 2.28.9"
  virtual at::Device device() const = 0;
  // The order of the sum is the ranks' order, on every rank.
  virtual bool sums_in_rank_order() const { return false; }

  // In place; each rank ends with the same bits.
  virtual TransportWorkPtr all_reduce(const at::Tensor& tensor, Milliseconds timeout) = 0;
  // The same for each of several tensors (at least one, of any dtypes), which must not overlap.
  virtual TransportWorkPtr all_reduce_coalesced(const std::vector<at::Tensor>& tensors, Milliseconds timeout);
  // True: that is one operation, which costs what a sum of as many bytes in one tensor does.
  virtual bool coalesces() const { return false; }
  // input: world_size equal chunks; output: the sum of everybody's chunk number `rank`.
  virtual TransportWorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                          Milliseconds timeout) = 0;
  // output: world_size chunks, each the input of one rank.
  virtual TransportWorkPtr all_gather(const at::Tensor& output, const at::Tensor& input,
                                      Milliseconds timeout) = 0;
  // Chunk k of the input goes to rank k; chunk k of the output comes from rank k. Counts are elements, in
  // memory order, without gaps; they may be 0.
  virtual TransportWorkPtr all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_counts,
                                      const at::Tensor& input, const std::vector<int64_t>& input_counts,
                                      Milliseconds timeout) = 0;
  virtual TransportWorkPtr broadcast(const at::Tensor& tensor, int root, Milliseconds timeout) = 0;
  // Exchanges at least one message, none of them with this rank itself. They begin together, so that ranks
  // whose messages cross do not wait for each other.
  virtual TransportWorkPtr exchange(const std::vector<Message>& messages, Milliseconds timeout) = 0;

  // True: an all_gather costs one hop, however many ranks there are.
  virtual bool gathers_in_one_hop() const { return false; }

  // True: operations run in order on a stream of their own, so that a dependent one can be started before the
  // former is done.
  virtual bool has_stream() const { return false; }
  // Only with a stream: calls f, now, with that stream as the current one and after what was enqueued on the
  // caller's. The work is done when what f enqueued is. f may start operations and wait for their works.
  virtual TransportWorkPtr run_on_stream(const std::function<void()>& f);

  // Throws where an operation is known to have failed; never blocks.
  virtual void check() {}

  // Begins what abort() waits for: of several transports, all must begin before one can be sure to end.
  virtual void start_abort() noexcept {}
  // Ends the operations under way, here at once and at the peers when they notice. Only the destructor may be
  // called afterwards, and wait() of works, which throws. Any thread, any number of times; returns within
  // about 5 s whatever the network does.
  virtual void abort() noexcept = 0;
};

// How a rank belongs to a group that is being split off: which ranks are in it, by their numbers in the
// communicator that is split, in the order of their new numbers. None: this rank is in no group.
struct GroupMembership {
  std::vector<int> members;
  std::vector<int> in_world;  // the same ranks by the world's numbers
  int rank = 0;               // this one's new number
  int number = 0;             // of the split, counted on each communicator
};

// What a Communicator is made of.
struct Connection {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_size = 1;
  int ranks_per_node = 1;              // 0: not the same everywhere, or not in a row
  int node = -1;                       // of this rank; -1: the world's ranks are not in nodes
  int host = 0;                        // the number of a rank of this host, the same for all of them
  std::shared_ptr<Transport> data;     // on the device that trains
  std::shared_ptr<Transport> control;  // host memory, for small messages; operations independent of data's
  std::shared_ptr<RankHealth> rank_health;
  bool joins_processes = false;  // and not threads, or nobody
  // Joins the ranks of a group anew: a connection with data, control and `join` alone, empty for a rank that
  // is in none. All ranks call it at the same time. Throws std::exception.
  std::function<Connection(const GroupMembership&)> join;
};

}  // namespace pacer::detail
