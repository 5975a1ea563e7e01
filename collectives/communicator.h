// The ranks of a run and what they can do together: collectives on tensors, with deadlines, exact counts of
// bytes, and errors that name the rank to look at.
//
//   auto world = pacer::Communicator::from_environment();   // torchrun, mpirun, srun, or a single process
//   world->all_reduce(tensor).wait();
//
// GPUs are joined by NCCL, CPUs by Gloo, threads of one process (tests, demos) by shared memory. Asked for
// one that is not to be had, a Communicator is refused; it never falls back to another.
//
// split() makes Communicators of some of the ranks, lane() one more of the same, whose operations do not wait
// for the others'.
//
// All ranks call the same operations in the same order. A call starts the operation and returns a handle; the
// tensors must stay untouched until wait(). On CUDA the operation runs beside the current stream, begins when
// what was enqueued there is done, and wait() makes the current stream wait, not the host.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <pacer/collectives/communication_error.h>
#include <pacer/collectives/message.h>

namespace pacer {

namespace detail {
class CommunicatorState;
class QueuedOperation;
struct Connection;
}  // namespace detail

// What carries the tensors.
enum class CommunicatorBackend {
  automatic,  // NCCL where this build has CUDA and the machine a GPU, else Gloo
  gloo,       // CPU tensors
  nccl,       // CUDA tensors, one GPU a rank
};

struct CommunicatorOptions {
  CommunicatorOptions() = default;
  TORCH_ARG(CommunicatorBackend, backend) = CommunicatorBackend::automatic;
  // The deadline of each operation, and of setting up. After it every rank throws CommunicationError. A rank
  // that has ended is noticed at once; this is for one that hangs, and longer than an evaluation or a save
  // that only one rank makes.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(10);
  // Sums add in rank order, ((x0 + x1) + x2) + ..., whatever the back-end prefers: the same bits on Gloo,
  // NCCL and in one process that adds the same parts. Costs overlap and a little memory.
  TORCH_ARG(bool, ordered_sum) = false;
  // Compare operation, dtype and size over all ranks before each call that does not say `agreed`: a mistake
  // then is an error on every rank instead of a wrong sum or a hang. Costs one small message a call.
  TORCH_ARG(bool, check_calls) = true;
  // The number of this rank's GPU among those that its process sees. Nothing: the only one where it sees one,
  // else that of its local rank. Two ranks never share one.
  TORCH_ARG(std::optional<int64_t>, gpu);
  // How many ranks share a node, a machine whose links inside are faster than those to others: rank r is
  // number r % n of node r / n. Nothing: what the launcher says, or, where the ranks met by themselves, which of
  // them share a host. Set it, alike on all ranks, to try several nodes on one machine.
  TORCH_ARG(std::optional<int>, ranks_per_node);
  // The address of this host to listen on, for jobs over several hosts; set it on every rank. Nothing: loopback
  // where all ranks are on this host, else the address of the interface that reaches the first rank.
  TORCH_ARG(std::optional<std::string>, listen_address);
};

// The options of one call.
struct CollectiveOptions {
  CollectiveOptions() = default;
  // It takes the place of the Communicator's timeout.
  TORCH_ARG(std::optional<std::chrono::milliseconds>, timeout);
  // The caller knows that all ranks call alike; see CommunicatorOptions::check_calls.
  TORCH_ARG(bool, agreed) = false;
  // It takes the place of the Communicator's ordered_sum. It must be the same on every rank.
  TORCH_ARG(std::optional<bool>, ordered_sum);
};

// An operation under way; empty: done. Dropping it does not end the operation, but nothing may be read or
// overwritten before wait(). Any thread, one at a time.
class [[nodiscard]] Work {
 public:
  Work() = default;
  Work(std::shared_ptr<detail::CommunicatorState> state, const char* operation, int64_t sequence,
       std::shared_ptr<detail::QueuedOperation> queued)
      : state_(std::move(state)), operation_(operation), sequence_(sequence), queued_(std::move(queued)) {}
  // Host memory: returns when the operation is done. CUDA: makes the current stream wait. Throws
  // CommunicationError where it failed or the deadline passed.
  void wait();
  // Never blocks; true also where the operation failed.
  bool is_done() const;
  // True where there is nothing to wait for because nothing was started.
  bool is_empty() const { return queued_ == nullptr; }

 private:
  std::shared_ptr<detail::CommunicatorState> state_;  // which a failure is reported to
  const char* operation_ = nullptr;
  int64_t sequence_ = 0;
  std::shared_ptr<detail::QueuedOperation> queued_;
};

// What an operation must send at least, from this rank to others, as a bandwidth-optimal algorithm does it:
// all_reduce 2 (W-1)/W n bytes, reduce_scatter (W-1)/W n, all_gather (W-1) times the input, all_to_all what
// is not for itself, broadcast n at the root (a chain), send n. Messages that only compare or notify are
// counted as "agreement".
struct Traffic {
  std::string phase;  // as set by set_phase; "" before
  std::string group;  // the name of the group or lane, "group COLOR" without one; "" for that of all ranks
  std::string operation;
  int64_t calls = 0;
  int64_t bytes_sent = 0;
};

class Communicator {
 public:
  // Joins the ranks by the variables of torchrun (also --no-python), Open MPI, MPICH or Slurm. Where none of
  // them is set, this process is the only rank. Throws InvalidArgument for variables that contradict each
  // other, Unavailable for a back-end that this build or machine does not have, CommunicationError where the
  // others do not come in time.
  static std::shared_ptr<Communicator> from_environment(const CommunicatorOptions& options = {});
  // Ranks of one host that meet through a file, which must not exist yet, in a folder of mode 0700 that
  // belongs to this user.
  static std::shared_ptr<Communicator> from_file(const std::string& path, int rank, int world_size,
                                                 const CommunicatorOptions& options = {});
  // Ranks that meet at a TCP address, where rank 0 listens until its process ends; one communicator may
  // follow another there. At a loopback address, unless listen_address is set, nobody listens: the ranks meet
  // through a file that stands for the port, in a folder that only this user can enter.
  static std::shared_ptr<Communicator> from_address(const std::string& host, int port, int rank,
                                                    int world_size, const CommunicatorOptions& options = {});
  // One rank, that of this process. Unavailable for a GPU that LibTorch does not see.
  static std::shared_ptr<Communicator> alone(at::Device device);
  // Threads of this process as ranks, on the CPU; element i is for the thread of rank i. Sums are always in
  // rank order.
  static std::vector<std::shared_ptr<Communicator>> in_process(int world_size,
                                                               const CommunicatorOptions& options = {});

  // Whether a Communicator of several processes is alive in this one.
  static bool joins_processes();

  // For transports of one's own, as tests have them.
  Communicator(detail::Connection connection, CommunicatorOptions options);
  // Makes the Communicator of a group or lane; split() and lane() call it.
  explicit Communicator(std::shared_ptr<detail::CommunicatorState> state) : state_(std::move(state)) {}
  Communicator(const Communicator&) = delete;
  // Ends what is under way.
  ~Communicator();

  // The number of this rank here, from 0.
  int rank() const;
  // How many ranks are joined here.
  int world_size() const;
  // The number that rank `rank` of this Communicator has among all ranks, as errors name it.
  int rank_in_world(int rank) const;
  // "" for the Communicator of all ranks.
  const std::string& name() const;
  // The number of this rank among the ranks of its host that are joined here, and how many these are.
  int local_rank() const;
  int local_size() const;
  // How many ranks each node has (see CommunicatorOptions). It is 0 where nodes have different numbers of
  // ranks, or where the ranks of a node do not follow one another.
  int ranks_per_node() const;
  // The device on which tensors of collectives must be.
  at::Device device() const;
  std::string backend_name() const;
  const CommunicatorOptions& options() const;

  // ---- Groups and lanes ----
  // All ranks of this Communicator call these, in the same order. Each costs the memory and the set-up of a
  // Communicator, so make them once. They share options, training step, phase and traffic() with this one,
  // and fail together: a rank that fails in one has failed in all, and the ranks that wait for it in another
  // are told why. Operations of different ones may be under way at the same time.

  // The Communicator of the ranks that gave the same `color`, numbered by `key`, ties by rank; null where
  // `color` is negative. `name`: for messages and traffic(), the same on every rank; empty: "group COLOR of
  // split NUMBER".
  std::shared_ptr<Communicator> split(int color, int key, const std::string& name = "");
  // The same ranks once more, with an order of operations (on CUDA, a stream) of its own: what waits there
  // holds up nothing here. The same one for the same name. On NCCL two ranks are connected by their first
  // messages, which hold up the host until both came; neighbours in rank order are when a lane is made.
  std::shared_ptr<Communicator> lane(const std::string& name);
  // The ranks of this rank's node, and those of all nodes that have this one's number there. The same ones
  // each time. Throw InvalidArgument where ranks_per_node() is 0.
  std::shared_ptr<Communicator> node();
  std::shared_ptr<Communicator> between_nodes();

  // ---- Collectives ----
  // They take contiguous tensors on device(), of any dtype the back-end can add (sums) or any at all (the
  // others). They throw InvalidArgument for tensors that do not fit, and CommunicationError if ranks differ.
  // Empty tensors are allowed and send nothing.

  // tensor = sum over ranks of tensor, the same bits on every rank.
  Work all_reduce(const at::Tensor& tensor, const CollectiveOptions& options = {});
  // The same for each of several tensors, of any dtypes, that share no memory: one operation on NCCL, one
  // after the other elsewhere. Counted as one all_reduce.
  Work all_reduce_coalesced(const std::vector<at::Tensor>& tensors, const CollectiveOptions& options = {});
  // The same for tensors of one floating-point dtype that travel as wire_dtype: they are rounded to it before
  // they are added, and so are the sums. Memory for their rounded copies while it runs.
  Work all_reduce_coalesced(const std::vector<at::Tensor>& tensors, at::ScalarType wire_dtype,
                            const CollectiveOptions& options = {});
  // Whether all_reduce_coalesced is one operation, so that gradients need not be gathered in flat memory.
  bool coalesces() const;
  // output (n elements) = sum over ranks of their input's chunk number rank() (input: world_size * n).
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      const CollectiveOptions& options = {});
  // output (world_size * n elements) = the inputs (n elements) of all ranks, in rank order.
  Work all_gather(const at::Tensor& output, const at::Tensor& input, const CollectiveOptions& options = {});
  // Chunk k of input goes to rank k, chunk k of output is from rank k; equal chunks.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const CollectiveOptions& options = {});
  // The same with `counts` elements a chunk, 0 or more.
  Work all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_counts,
                  const at::Tensor& input, const std::vector<int64_t>& input_counts,
                  const CollectiveOptions& options = {});
  // tensor = the root's.
  Work broadcast(const at::Tensor& tensor, int root = 0, const CollectiveOptions& options = {});
  // Returns when every rank has called it.
  void barrier(const CollectiveOptions& options = {});
  // Point to point; never checked.
  Work send(const at::Tensor& tensor, int to, const CollectiveOptions& options = {});
  Work receive(const at::Tensor& tensor, int from, const CollectiveOptions& options = {});
  // Messages that start together, so that ranks whose messages cross, as in a ring or a pipeline, do not wait
  // for each other: send_receive({Message::send(x, next), Message::receive(y, former)}).
  Work send_receive(const std::vector<Message>& messages, const CollectiveOptions& options = {});

  // ---- Small messages on the host, whatever the device; independent of the operations above. ----

  // The texts of all ranks, which may differ in length. Blocks.
  std::vector<std::string> exchange(const std::string& text, const CollectiveOptions& options = {});
  // Starts all_gather of CPU tensors.
  Work all_gather_host(const at::Tensor& output, const at::Tensor& input,
                       const CollectiveOptions& options = {});

  // ---- Trouble ----

  // This rank cannot go on: the others fail in their operations with an error that names it and `reason`.
  // Afterwards this Communicator refuses everything. Returns within about 10 s.
  void leave(const std::string& reason) noexcept;
  // Ends the operations under way; the others notice sooner or later. `leave` is kinder.
  void abort() noexcept;
  // Throws the CommunicationError of an operation that failed, if there is one. On CUDA a failure shows late.
  void check();
  bool has_failed() const;

  // Messages and counters name the training step and the phase, which is a name for what is going on
  // ("warm-up", "compressed"). A phase lasts until another one is set.
  void set_step(int64_t step);
  void set_phase(const std::string& phase);
  // Returns the counts so far, those of all groups and lanes included. Each phase, group and operation has
  // its own, in the order in which they first appeared.
  std::vector<Traffic> traffic() const;
  // Returns the sum over all phases, groups and operations.
  int64_t bytes_sent() const;

 private:
  void compare(const char* operation, const at::Tensor& tensor, int64_t elements, int root,
               const CollectiveOptions& options);

  std::shared_ptr<detail::CommunicatorState> state_;
};

}  // namespace pacer
