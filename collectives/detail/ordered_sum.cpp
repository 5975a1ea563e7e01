#include <pacer/collectives/detail/ordered_sum.h>

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <pacer/core/tile.h>

namespace pacer::detail {

void add_in_order(const at::Tensor& sum, const at::Tensor& parts, int count) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = sum.view({-1});
  flat.copy_(parts.narrow(0, 0, flat.numel()));
  for (int i = 1; i < count; ++i) flat.add_(parts.narrow(0, i * flat.numel(), flat.numel()));
}

OperationParts ordered_all_reduce(std::shared_ptr<Transport> transport, const at::Tensor& tensor, int rank,
                                  int world_size, std::chrono::milliseconds timeout) {
  const int64_t chunk = ceil_divide(tensor.numel(), world_size);
  const std::vector<int64_t> counts(static_cast<size_t>(world_size), chunk);
  const at::Tensor flat = tensor.view({-1});
  // The last chunk may be short: both copies are padded, by whatever was there, which nobody reads.
  const at::Tensor padded = at::empty({chunk * world_size}, tensor.options().requires_grad(false));
  const at::Tensor parts = at::empty_like(padded);
  const at::Tensor sum = padded.narrow(0, rank * chunk, chunk);
  const auto exchange = [=] {
    const at::NoGradGuard no_grad;
    padded.narrow(0, 0, flat.numel()).copy_(flat);
    return transport->all_to_all(parts, counts, padded, counts, timeout);
  };
  const auto add_and_share = [=] {
    add_in_order(sum, parts, world_size);
    return transport->all_gather(parts, sum, timeout);
  };
  const auto put_back = [=] {
    const at::NoGradGuard no_grad;
    flat.copy_(parts.narrow(0, 0, flat.numel()));
  };
  return {{exchange, add_and_share}, put_back};
}

OperationParts ordered_reduce_scatter(std::shared_ptr<Transport> transport, const at::Tensor& output,
                                      const at::Tensor& input, int /*rank*/, int world_size,
                                      std::chrono::milliseconds timeout) {
  const std::vector<int64_t> counts(static_cast<size_t>(world_size), output.numel());
  const at::Tensor parts = at::empty({input.numel()}, input.options().requires_grad(false));
  const auto exchange = [=] { return transport->all_to_all(parts, counts, input, counts, timeout); };
  const auto add = [=] { add_in_order(output, parts, world_size); };
  return {{exchange}, add};
}

TransportWorkPtr send_and_receive(Transport& transport, const at::Tensor& sent, int to,
                                  const at::Tensor& received, int from, std::chrono::milliseconds timeout) {
  transport.begin_group();
  TransportWorkPtr receive = transport.receive(received, from, timeout);
  TransportWorkPtr send = transport.send(sent, to, timeout);
  transport.end_group();
  std::vector<TransportWorkPtr> both;
  both.push_back(std::move(receive));
  both.push_back(std::move(send));
  return joined(std::move(both));
}

}  // namespace pacer::detail
