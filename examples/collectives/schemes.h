// Six ways in which the ranks of a data-parallel run can add their gradients, oldest first, written out of
// sends, receives and the simplest collectives: to be read, and to be measured beside each other. Training
// uses the last one, which is pacer::GradientBucketer; the others are not part of the library.
//
// Each of the first five leaves, in every rank's `gradients`, the sum over ranks of what was there: dense
// tensors of one dtype on world.device(), the same shapes in the same order on every rank. Every rank ends
// with the same bits. Between the schemes the last bits differ, because they add in different orders.
//
// n: bytes of all gradients of a rank. W: ranks. T: tensors. B: bytes per second of a rank's link, each way.
// A message costs its bytes / B plus a latency, so both are counted. The measurements are in
// docs/measurements/collectives.md.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/gradient_bucketer.h>

namespace collectives {

// Everyone sends to rank 0, rank 0 adds and sends the sum to everyone: a parameter server that is one of the
// ranks, and what torch::nn::parallel::data_parallel does with the GPUs of one process. Everything passes
// rank 0's link, (W-1) n bytes in and then (W-1) n out, while the other links idle: 2 (W-1) n / B, growing
// with W.
//   sent by rank 0: W-1 messages, (W-1) n bytes;  by each other: 1 message, n bytes
void gather_and_broadcast(pacer::Communicator& world, std::vector<at::Tensor>& gradients);

// Everyone sends everything to everyone and adds what arrives. One exchange instead of two, all links busy,
// but each byte travels W-1 times: (W-1) n / B.
//   sent by each: W-1 messages, (W-1) n bytes
void all_to_all_sum(pacer::Communicator& world, std::vector<at::Tensor>& gradients);

// Each rank adds only a W-th, and the parts travel around a ring: W-1 steps after which each rank has one
// finished part (reduce-scatter), W-1 steps in which the finished parts go around (all-gather). In no
// algorithm does the busiest rank send fewer bytes (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
// algorithms for clusters of workstations"): 2 (W-1)/W n / B, which hardly grows with W. The price is 2 (W-1)
// latencies.
//   sent by each: 2 (W-1) messages, 2 (W-1)/W n bytes (n rounded up to W equal parts)
void ring_all_reduce(pacer::Communicator& world, std::vector<at::Tensor>& gradients);

// The library's all_reduce, once per tensor, after backward: the first thing one writes. Bytes are optimal,
// but each of the T tensors, many of them biases of a kilobyte, pays all latencies of an all-reduce.
//   sent by each: T all-reduces, 2 (W-1)/W n bytes in all
void per_tensor(pacer::Communicator& world, std::vector<at::Tensor>& gradients);

// All gradients copied into one flat buffer, one all-reduce, and back: latencies are paid once. But nothing
// can travel before the last gradient is there: a step takes the time of backward plus that of the exchange.
//   sent by each: 1 all-reduce, 2 (W-1)/W n bytes
void one_bucket(pacer::Communicator& world, std::vector<at::Tensor>& gradients);

// Several flat buffers, in the order in which backward finishes the gradients; each buffer's all-reduce
// starts when it is full, while backward goes on computing (Li et al. 2020, "PyTorch Distributed",
// section 3.2). What is left to wait for is the last bucket, and what of the exchange takes longer than the
// rest of backward. The sums are in the .grad() of the bucketer's parameters.
//   sent by each: n / bucket_bytes all-reduces, 2 (W-1)/W n bytes
void bucketed_and_overlapped(pacer::GradientBucketer& bucketer, const at::Tensor& loss);

// The first five, for programs that compare them.
struct Scheme {
  std::string name;
  void (*run)(pacer::Communicator& world, std::vector<at::Tensor>& gradients);
};
const std::vector<Scheme>& schemes_after_backward();

// What a rank must send at least so that every rank gets the sum: 2 (W-1)/W n bytes.
double least_bytes(double n, int world_size);

}  // namespace collectives
