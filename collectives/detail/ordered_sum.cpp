#include <pacer/collectives/detail/ordered_sum.h>

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <pacer/core/tile.h>

namespace pacer::detail {
namespace {

using Milliseconds = Transport::Milliseconds;

// sum = parts[0] + parts[1] + ..., `parts` being `count` pieces of the size of `sum`, one behind the other.
void add_in_order(const at::Tensor& sum, const at::Tensor& parts, int count) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = sum.view({-1});
  flat.copy_(parts.narrow(0, 0, flat.numel()));
  for (int i = 1; i < count; ++i) flat.add_(parts.narrow(0, i * flat.numel(), flat.numel()));
}

}  // namespace

TransportCalls ordered_all_reduce(const at::Tensor& tensor, int rank, int world_size) {
  const int64_t chunk = ceil_divide(tensor.numel(), world_size);
  const std::vector<int64_t> counts(static_cast<size_t>(world_size), chunk);
  const at::Tensor flat = tensor.view({-1});
  // The last chunk may be short: both copies are padded, by whatever was there, which nobody reads.
  const at::Tensor padded = at::empty({chunk * world_size}, tensor.options().requires_grad(false));
  const at::Tensor parts = at::empty_like(padded);
  const at::Tensor sum = padded.narrow(0, rank * chunk, chunk);
  const auto exchange = [=](Transport& transport, Milliseconds timeout) {
    const at::NoGradGuard no_grad;
    padded.narrow(0, 0, flat.numel()).copy_(flat);
    return transport.all_to_all(parts, counts, padded, counts, timeout);
  };
  const auto add_and_share = [=](Transport& transport, Milliseconds timeout) {
    add_in_order(sum, parts, world_size);
    return transport.all_gather(parts, sum, timeout);
  };
  const auto put_back = [=] {
    const at::NoGradGuard no_grad;
    flat.copy_(parts.narrow(0, 0, flat.numel()));
  };
  return {{exchange, add_and_share}, put_back};
}

TransportCalls ordered_reduce_scatter(const at::Tensor& output, const at::Tensor& input, int world_size) {
  const std::vector<int64_t> counts(static_cast<size_t>(world_size), output.numel());
  const at::Tensor parts = at::empty({input.numel()}, input.options().requires_grad(false));
  const auto exchange = [=](Transport& transport, Milliseconds timeout) {
    return transport.all_to_all(parts, counts, input, counts, timeout);
  };
  return {{exchange}, [=] { add_in_order(output, parts, world_size); }};
}

}  // namespace pacer::detail
