// Gradients that are added over all ranks while backward still runs: they belong to a few buckets, in the
// order in which backward finishes them, and each bucket's all-reduce starts when its last gradient is there
// (the scheme of Li et al., "PyTorch Distributed", arXiv:2006.15704, section 3.2).
//
//   pacer::GradientBucketer bucketer(model->named_parameters(), world);
//   bucketer.begin_backward();
//   loss.backward();              // buckets travel while this runs
//   bucketer.end_backward();
//   bucketer.wait();              // every .grad() is the sum over ranks
//   optimizer.step();  optimizer.zero_grad();
//
// A Session with a Communicator does all of this by itself (parallel/data_parallel.h).
//
// A bucket is flat memory, into which gradients are copied and whose views they then are, until zero_grad;
// or, in place, only a list of gradients, which stay where backward put them (NCCL). Nothing is divided: the
// mean over ranks is the sum times 1 / world_size (times 1 / scale()), which belongs into the optimizer's
// factor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/gradient_scope.h>

namespace pacer {

struct BucketOptions {
  BucketOptions() = default;
  // Bytes of a bucket, >= 1: it takes no more parameters once it has so many. Unset: 25 MiB; in place, where
  // larger ones need no flat memory, a twelfth of all gradients, but at least 25 and at most 100 MiB.
  TORCH_ARG(std::optional<int64_t>, bucket_bytes);
  // The size of the bucket that is full first. A small one lets communication begin early.
  TORCH_ARG(int64_t, first_bucket_bytes) = 1 << 20;
  // What fp32 gradients are rounded to on the wire: at::kBFloat16 halves the bytes, at the price of bf16
  // sums. Unset: their own dtype.
  TORCH_ARG(std::optional<at::ScalarType>, wire_dtype);
  // What a parameter means that no backward of a window reached on a rank: false: an error that names it;
  // true: its gradient is zero there, and where no rank has reached it, it has none.
  TORCH_ARG(bool, unused_is_zero) = false;
  // Gradients are reduced where they lie instead of in flat memory; fp16 ones never are. The same on every
  // rank. Unset: where the back-end adds many tensors at the cost of one (Communicator::coalesces).
  TORCH_ARG(std::optional<bool>, in_place);
  // The end of the sentence for whoever touches a gradient between end_backward() and wait(): what to do
  // instead.
  TORCH_ARG(std::string, touch_remedy) = "call wait() first";
};

class GradientBucketer {
 public:
  using NamedParameter = std::pair<std::string, at::Tensor>;

  // The same parameters, in the same order, on every rank; those that need no gradient are left out. They
  // must be on the Communicator's device. Hooks stay on the parameters until the bucketer is destroyed.
  // `may_stay_local`: those of them that set_scope() is about. Throws InvalidArgument for parameters
  // elsewhere and for bad options.
  GradientBucketer(const std::vector<NamedParameter>& parameters, std::shared_ptr<Communicator> world,
                   const BucketOptions& options = {}, const std::vector<at::Tensor>& may_stay_local = {});
  ~GradientBucketer();
  GradientBucketer(const GradientBucketer&) = delete;

  // The next backward is the last of its window, and its gradients (added to those that are there) are
  // reduced. `zero`: parameters whose gradient is zero in the whole window on every rank, for example of
  // dropped layers; a bucket of nothing else is not sent. `done`: those that this backward does not reach
  // any more, though an earlier one did.
  void begin_backward(const std::vector<at::Tensor>& zero = {}, const std::vector<at::Tensor>& done = {});
  // Throws InvalidArgument that names them where parameters were not reached (see unused_is_zero); then this
  // rank must leave its peers. After a backward that threw, drop() takes the place of this.
  void end_backward();
  // Reduces the gradients as they are, without a backward: for a window that ended early. Throws as
  // end_backward does.
  void reduce(const std::vector<at::Tensor>& zero = {});
  // Returns when every gradient is the sum over ranks (CUDA: the current stream waits). The first time, all
  // ranks then take over the order in which rank 0's gradients came. From end_backward() to here, grad()
  // of the parameters is a stand-in without memory: InvalidArgument that names the parameter where it was
  // cleared or replaced since, once all sums are over; the other gradients are sums then, and the next window
  // may begin.
  void wait();
  // Gives up the window that is under way, at the same place on all ranks; or this rank must leave its peers.
  // It never waits. Gradients whose bucket was sent are undefined afterwards, and the others are no sums. The
  // next begin_backward() or reduce() waits for what was sent; it throws CommunicationError where that
  // failed, and where ranks have sent different numbers of buckets. Ranks of which one
  // dropped and another waited are not told apart: they wait for each other.
  void drop();

  // From now on wait() calls f with the parameters of each bucket as soon as their gradients are there, while
  // later buckets are still on their way. f may call nothing of this bucketer.
  using Arrived = std::function<void(const std::vector<at::Tensor>& parameters)>;
  void on_arrival(Arrived f);

  // Between windows: from the next one on, the gradients of the parameters that may stay local are added over
  // these ranks only. GradientScope::rank: they stay where backward puts them, and may be undefined;
  // GradientScope::node: they are added in rank order.
  void set_scope(GradientScope scope);

  // The order in which gradients fill the buckets, as positions in the list of trained parameters; empty
  // until it was learned. A backend may add in an order that depends on where an element lies, so that a run
  // that goes on to the bit must have the buckets it had: use_order() before the first begin_backward. Throws
  // InvalidArgument for what is no permutation.
  std::vector<int64_t> order() const;
  void use_order(const std::vector<int64_t>& order);

  // What the sums were multiplied with before they were added: 1 / world_size where fp16 gradients are
  // involved, whose sum could overflow, else 1.
  double scale() const;
  // The buckets as they are now: for each the names of its parameters, in order, and the bytes it sends.
  std::vector<std::vector<std::string>> buckets() const;
  std::vector<int64_t> bucket_bytes() const;
  // How many buckets were sent in the last window, while backward still ran and in all.
  int64_t buckets_sent_early() const;
  int64_t buckets_sent() const;

 private:
  class State;
  std::shared_ptr<State> state_;  // shared with the parameters' hooks
};

}  // namespace pacer
