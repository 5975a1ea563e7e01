// The mean over ranks of a vector that travels as signs: one bit an element instead of 32, in two
// collectives, with what rounding to signs loses carried over into the next call (error feedback; Tang et
// al., "1-bit Adam", arXiv:2102.02888, section 3 and figure 3).
//
//   pacer::CompressedAllReduce mean(world, 1'000'000);
//   mean.reduce(buffer);          // fp32, 1'000'000 elements: what all ranks agree the mean is, roughly
//
// A single call is a coarse guess: every element becomes plus or minus its chunk's scale. The sum of many
// calls is not: sum of results + mean of worker errors + server error = sum of the true means, up to
// rounding. Use it for what is summed up, as a momentum is.
//
// One call on rank i of W, all sums in rank order:
//   every rank:         c = buffer + e             e: what its call before this one has lost
//                       s = |c|_2 / sqrt(n)        s and the signs of c go to their servers, chunk by chunk
//                       e = c - s * sgn(c)         what is lost now, for the next call
//   server of chunk k:  y = mean_i s_i sgn_i + E   rank k; E: what it has lost before
//                       S = |y|_2 / sqrt(n_k)      S and the signs of y go to all ranks
//                       E = y - S * sgn(y)         what is lost now, for the next call
//   every rank:         buffer = S_k * sgn_k       on chunk k; the same bits on every rank and back-end
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/compression/compression_options.h>

namespace pacer {

namespace detail {
class DirectionExchange;
class OneBitExchange;
}  // namespace detail
namespace kernels {
struct GradientCheck;
}

class CompressedAllReduce {
 public:
  // Elements [begin, end) of the buffer.
  struct Range {
    int64_t begin;
    int64_t end;
  };

  // The same size, >= 0, and options on every rank, which are compared: all ranks must come here. Errors
  // start at zero. Throws InvalidArgument, also for hierarchical where Communicator::ranks_per_node() is 0,
  // CommunicationError where ranks differ.
  CompressedAllReduce(std::shared_ptr<Communicator> world, int64_t size,
                      const CompressionOptions& options = {});
  ~CompressedAllReduce();
  CompressedAllReduce(const CompressedAllReduce&) = delete;

  // In place: `buffer` (fp32, contiguous, `size` elements, on the Communicator's device) becomes the
  // compressed mean over ranks. Throws InvalidArgument before anything travels; where ranks fail or numbers
  // are not finite Error, after which this object refuses to go on until its errors are set anew: who got how
  // far is unknown. On CUDA nothing waits for the device, so that numbers that are not finite show in a later
  // call, and the buffer stays as it was.
  void reduce(const at::Tensor& buffer);

  int64_t size() const;
  // What this rank, or hierarchical its node, serves: its part of the buffer.
  Range served() const;

  // What the last call lost: of this rank's (hierarchical: its node's mean) buffer (fp32, `size` elements),
  // and of the mean over the range it serves (fp32). Copies. Wait for a GPU.
  at::Tensor worker_error() const;
  at::Tensor server_error() const;
  // Goes on from these: the errors of a former run, or zeros.
  void set_errors(const at::Tensor& worker, const at::Tensor& server);

  // The bytes that this rank sent to others as signs, in all calls so far. What averages inside nodes is in
  // the Communicator's traffic().
  int64_t bytes_sent() const;

 private:
  friend class detail::DirectionExchange;

  // Without the comparison, for which agree() then comes before the first call.
  struct Unagreed {};
  CompressedAllReduce(std::shared_ptr<Communicator> world, int64_t size, const CompressionOptions& options,
                      Unagreed);
  void agree();
  // With gradients that the buffer was made of (on the device): where they are not finite nothing changes. CUDA
  // only; null: nobody looked.
  void reduce(const at::Tensor& buffer, const kernels::GradientCheck* check);
  // Throws where a call failed before; with `wait` also where the host does not know yet.
  void check(bool wait) const;
  void average_in_node(const at::Tensor& buffer);

  bool compresses_;
  int64_t calls_ = 0;
  std::unique_ptr<detail::OneBitExchange> exchange_;
};

}  // namespace pacer
