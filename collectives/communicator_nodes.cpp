// Operations inside nodes and between them. Each is an all_to_all of the whole world in which most ranks send
// each other nothing, so that deadlines, failures and order are those of every other operation.
#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/communicator_state.h>
#include <pacer/collectives/detail/ordered_sum.h>
#include <pacer/collectives/detail/tensor_check.h>
#include <pacer/core/error.h>
#include <pacer/core/tile.h>

namespace pacer {

using detail::bytes_of;
using detail::check_tensor;
using detail::NextPart;

namespace {

// Ranks `first`, `first` + `stride`, ...
struct Peers {
  int world_size, first, stride, count;
  bool share_a_node;

  // So many elements from or to each of them, none from or to the others.
  std::vector<int64_t> counts(int64_t elements) const {
    std::vector<int64_t> counts(static_cast<size_t>(world_size), 0);
    for (int i = 0; i < count; ++i) counts[static_cast<size_t>(first + i * stride)] = elements;
    return counts;
  }
};

int node_size(const Communicator& world, const char* operation) {
  require(world.ranks_per_node() > 0, operation,
          " needs nodes of as many ranks each, whose ranks follow one another, but this run's do not; start "
          "as many ranks on every machine, machine by machine, or set ranks_per_node");
  return world.ranks_per_node();
}

// The ranks of this node.
Peers mates(const Communicator& world, const char* operation) {
  const int size = node_size(world, operation);
  return {world.world_size(), world.rank() / size * size, 1, size, /*share_a_node=*/true};
}

// One rank of each node.
Peers counterparts(const Communicator& world, const char* operation) {
  const int size = node_size(world, operation);
  return {world.world_size(), world.rank() % size, size, world.world_size() / size, /*share_a_node=*/false};
}

NextPart exchange_part(std::shared_ptr<detail::Transport> transport, const Peers& peers,
                       const at::Tensor& output, const at::Tensor& input, std::chrono::milliseconds timeout) {
  const std::vector<int64_t> counts = peers.counts(input.numel() / peers.count);
  if (peers.share_a_node) {
    return [=] { return transport->all_to_all_in_node(output, counts, input, counts, timeout); };
  }
  return [=] { return transport->all_to_all(output, counts, input, counts, timeout); };
}

// Sends the input, once for each of the peers.
Work gather_from_peers(detail::CommunicatorState& state, const char* operation, const Peers& peers,
                       const at::Tensor& output, const at::Tensor& input, const CollectiveOptions& options) {
  if (input.numel() == 0) return {};
  const at::Tensor copies = at::empty({peers.count, input.numel()}, input.options().requires_grad(false));
  const NextPart send = [=, exchange = exchange_part(state.connection().data, peers, output, copies,
                                                     state.timeout_of(options))] {
    const at::NoGradGuard no_grad;
    copies.copy_(input.view({1, -1}).expand_as(copies));
    return exchange();
  };
  return state.start(operation, (peers.count - 1) * bytes_of(input), {{send}, nullptr});
}

}  // namespace

Work Communicator::all_reduce_in_node(const std::vector<at::Tensor>& tensors, at::ScalarType wire_dtype,
                                      const CollectiveOptions& options) {
  constexpr const char* kName = "all_reduce_in_node";
  const Peers peers = mates(*this, kName);
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(kName, "tensor", tensor, device());
    elements += tensor.numel();
  }
  const at::TensorOptions on_wire = at::TensorOptions().dtype(wire_dtype).device(device());
  compare(kName, at::empty({0}, on_wire), elements, 0, options);
  if (elements == 0 || peers.count == 1) return {};

  // The tensor itself, or rounded copies of all, one behind the other.
  const bool is_flat = tensors.size() == 1 && tensors[0].scalar_type() == wire_dtype;
  const at::Tensor flat = is_flat ? tensors[0].detach().view({-1}) : at::empty({elements}, on_wire);
  std::vector<at::Tensor> pieces;
  for (int64_t begin = 0; !is_flat && pieces.size() < tensors.size(); begin += pieces.back().numel()) {
    const at::Tensor& tensor = tensors[pieces.size()];
    pieces.push_back(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
  }
  // Each rank of the node adds up one chunk; the last ones may be short or empty.
  const int64_t chunk = ceil_divide(elements, peers.count);
  const auto begin_of = [=](int64_t peer) { return std::min(elements, peer * chunk); };
  std::vector<int64_t> chunks = peers.counts(0);
  for (int peer = 0; peer < peers.count; ++peer) {
    chunks[static_cast<size_t>(peers.first + peer)] = begin_of(peer + 1) - begin_of(peer);
  }
  const int64_t own = chunks[static_cast<size_t>(rank())];
  const at::Tensor sum = flat.narrow(0, begin_of(rank() - peers.first), own);
  const at::Tensor parts = at::empty({peers.count, own}, on_wire);
  const std::vector<int64_t> shares = peers.counts(own);
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;

  const NextPart send = [=] {
    const at::NoGradGuard no_grad;
    if (!is_flat) at::_foreach_copy_(pieces, tensors);
    return transport->all_to_all_in_node(parts, shares, flat, chunks, timeout);
  };
  const NextPart share = [=] {
    const at::NoGradGuard no_grad;
    detail::add_in_order(sum, parts.view({-1}), peers.count);
    parts.copy_(sum.view({1, own}).expand_as(parts));
    return transport->all_to_all_in_node(flat, chunks, parts, shares, timeout);
  };
  const auto put_back = [=] {
    const at::NoGradGuard no_grad;
    if (!is_flat) at::_foreach_copy_(tensors, pieces);
  };
  const int64_t sent = elements - own + (peers.count - 1) * own;
  return state_->start(kName, sent * static_cast<int64_t>(flat.element_size()), {{send, share}, put_back});
}

Work Communicator::all_gather_in_node(const at::Tensor& output, const at::Tensor& input,
                                      const CollectiveOptions& options) {
  constexpr const char* kName = "all_gather_in_node";
  const Peers peers = mates(*this, kName);
  check_tensor(kName, "output", output, device());
  detail::check_gathered(kName, output, input, peers.count);
  compare(kName, input, input.numel(), 0, options);
  return gather_from_peers(*state_, kName, peers, output, input, options);
}

Work Communicator::all_to_all_between_nodes(const at::Tensor& output, const at::Tensor& input,
                                            const CollectiveOptions& options) {
  constexpr const char* kName = "all_to_all_between_nodes";
  const Peers peers = counterparts(*this, kName);
  check_tensor(kName, "output", output, device());
  check_tensor(kName, "input", input, device());
  require(input.scalar_type() == output.scalar_type() && input.numel() == output.numel() &&
              input.numel() % peers.count == 0,
          kName, ": input and output must have one dtype and size, equal chunks for ", peers.count,
          " nodes; they have ", input.numel(), " and ", output.numel(), " elements");
  compare(kName, input, input.numel(), 0, options);
  if (input.numel() == 0) return {};
  return state_->start(
      kName, (peers.count - 1) * bytes_of(input) / peers.count,
      {{exchange_part(state_->connection().data, peers, output, input, state_->timeout_of(options))},
       nullptr});
}

Work Communicator::all_gather_between_nodes(const at::Tensor& output, const at::Tensor& input,
                                            const CollectiveOptions& options) {
  constexpr const char* kName = "all_gather_between_nodes";
  const Peers peers = counterparts(*this, kName);
  check_tensor(kName, "output", output, device());
  detail::check_gathered(kName, output, input, peers.count);
  compare(kName, input, input.numel(), 0, options);
  return gather_from_peers(*state_, kName, peers, output, input, options);
}

}  // namespace pacer
