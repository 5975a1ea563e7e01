// The six schemes. No tricks: a wait() stands behind each message, so that the lines are the order of events.
#include "schemes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <pacer/core/error.h>

namespace collectives {
namespace {

using at::Tensor;
using pacer::Communicator;
using pacer::Message;

// All ranks call alike here, so the Communicator need not compare their calls first.
pacer::CollectiveOptions agreed() { return pacer::CollectiveOptions().agreed(true); }

// All gradients, one behind the other, as one tensor of one dimension.
Tensor flatten(const std::vector<Tensor>& gradients) {
  std::vector<Tensor> pieces;
  for (const Tensor& gradient : gradients) {
    pacer::require(gradient.scalar_type() == gradients.front().scalar_type(),
                   "the schemes take gradients of one dtype, not ", gradients.front().scalar_type(), " and ",
                   gradient.scalar_type());
    pieces.push_back(gradient.reshape({-1}));
  }
  return at::cat(pieces);
}

void unflatten(const Tensor& flat, const std::vector<Tensor>& gradients) {
  int64_t offset = 0;
  for (const Tensor& gradient : gradients) {
    gradient.copy_(flat.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
    offset += gradient.numel();
  }
}

}  // namespace

void gather_and_broadcast(Communicator& world, std::vector<Tensor>& gradients) {
  if (world.world_size() == 1 || gradients.empty()) return;
  const at::NoGradGuard no_grad;
  const Tensor flat = flatten(gradients);
  if (world.rank() == 0) {
    const Tensor received = at::empty_like(flat);
    for (int peer = 1; peer < world.world_size(); ++peer) {
      world.receive(received, peer).wait();
      flat.add_(received);
    }
    for (int peer = 1; peer < world.world_size(); ++peer) world.send(flat, peer).wait();
  } else {
    world.send(flat, 0).wait();
    world.receive(flat, 0).wait();
  }
  unflatten(flat, gradients);
}

void all_to_all_sum(Communicator& world, std::vector<Tensor>& gradients) {
  if (world.world_size() == 1 || gradients.empty()) return;
  const at::NoGradGuard no_grad;
  const int ranks = world.world_size(), rank = world.rank();
  const Tensor flat = flatten(gradients);
  std::vector<Tensor> of_rank(static_cast<size_t>(ranks));
  of_rank[static_cast<size_t>(rank)] = flat;
  // At distance 1 everyone sends to the next rank, at distance 2 to the one after: every link is used once a
  // round, in both directions, and nobody waits for somebody who waits.
  for (int distance = 1; distance < ranks; ++distance) {
    const int to = (rank + distance) % ranks, from = (rank + ranks - distance) % ranks;
    Tensor& received = of_rank[static_cast<size_t>(from)];
    received = at::empty_like(flat);
    world.send_receive({Message::send(flat, to), Message::receive(received, from)}).wait();
  }
  // In rank order on every rank, not in that of arrival: floating-point sums depend on it, and replicas that
  // differ in a bit grow apart.
  const Tensor sum = of_rank.front().clone();
  for (size_t i = 1; i < of_rank.size(); ++i) sum.add_(of_rank[i]);
  unflatten(sum, gradients);
}

// W = 3, chunks a, b, c; a01 is the sum of a over ranks 0 and 1. Everybody sends to the right:
//             rank 0           rank 1           rank 2
//   start     a0  b0   c0      a1   b1  c1      a2   b2   c2
//   step 1    a0  b0   c20     a01  b1  c1      a2   b12  c2
//   step 2    a0  b120 c20     a01  b1  c201    a012 b12  c2      one finished chunk each
//   steps 3 and 4: the finished chunks go around and replace the others
void ring_all_reduce(Communicator& world, std::vector<Tensor>& gradients) {
  if (world.world_size() == 1 || gradients.empty()) return;
  const at::NoGradGuard no_grad;
  const int ranks = world.world_size(), rank = world.rank();
  const int right = (rank + 1) % ranks, left = (rank + ranks - 1) % ranks;
  const Tensor flat = flatten(gradients);
  if (flat.numel() == 0) return;

  // W equal chunks; the last one may be filled up with zeros.
  const int64_t length = (flat.numel() + ranks - 1) / ranks;
  const Tensor padding = at::empty({length * ranks - flat.numel()}, flat.options()).zero_();
  const Tensor padded = padding.numel() == 0 ? flat : at::cat({flat, padding});
  const auto chunk = [&](int number) {
    return padded.narrow(0, (number + 2 * ranks) % ranks * length, length);
  };

  // Reduce-scatter: in step s, rank r passes on chunk r - s, to which s + 1 ranks have added by now.
  const Tensor received = at::empty({length}, flat.options());
  for (int step = 0; step < ranks - 1; ++step) {
    world.send_receive({Message::send(chunk(rank - step), right), Message::receive(received, left)}).wait();
    chunk(rank - step - 1).add_(received);
  }
  // All-gather: rank r has finished chunk r + 1; it passes on what is finished and takes what comes.
  for (int step = 0; step < ranks - 1; ++step) {
    world
        .send_receive(
            {Message::send(chunk(rank + 1 - step), right), Message::receive(chunk(rank - step), left)})
        .wait();
  }
  unflatten(padded, gradients);
}

void per_tensor(Communicator& world, std::vector<Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  for (const Tensor& gradient : gradients) {
    const Tensor sum = gradient.contiguous();  // the gradient itself, where it has no gaps
    world.all_reduce(sum, agreed()).wait();
    if (!sum.is_same(gradient)) gradient.copy_(sum);
  }
}

void one_bucket(Communicator& world, std::vector<Tensor>& gradients) {
  if (world.world_size() == 1 || gradients.empty()) return;
  const at::NoGradGuard no_grad;
  const Tensor flat = flatten(gradients);
  world.all_reduce(flat, agreed()).wait();
  unflatten(flat, gradients);
}

void bucketed_and_overlapped(pacer::GradientBucketer& bucketer, const Tensor& loss) {
  bucketer.begin_backward();
  loss.backward();  // each full bucket leaves from inside this call
  bucketer.end_backward();
  bucketer.wait();
}

const std::vector<Scheme>& schemes_after_backward() {
  static const std::vector<Scheme> schemes = {{"gather_and_broadcast", gather_and_broadcast},
                                              {"all_to_all_sum", all_to_all_sum},
                                              {"ring_all_reduce", ring_all_reduce},
                                              {"per_tensor", per_tensor},
                                              {"one_bucket", one_bucket}};
  return schemes;
}

double least_bytes(double n, int world_size) { return 2.0 * (world_size - 1) / world_size * n; }

}  // namespace collectives
