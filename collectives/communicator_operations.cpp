// What each operation asks of its tensors, what it counts, what it starts, and what its Work waits for.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/communicator_state.h>
#include <pacer/collectives/detail/gather.h>
#include <pacer/collectives/detail/ordered_sum.h>
#include <pacer/core/error.h>
#include <pacer/core/tile.h>
#include <pacer/files/crc32c.h>

namespace pacer {

using detail::Transport;
using detail::TransportCall;
using detail::TransportCalls;

namespace {

using Milliseconds = Transport::Milliseconds;

// Tensors that are rounded for the wire begin there at multiples of this, so that kernels may use wide
// accesses.
constexpr int64_t kWireAlignment = 128;  // elements

int64_t sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

// Throws InvalidArgument that names operation and tensor.
void check_tensor(const char* operation, const char* which, const at::Tensor& tensor, at::Device device) {
  require(tensor.defined(), operation, ": the ", which, " is undefined");
  require(tensor.layout() == at::kStrided && tensor.is_contiguous(), operation, ": the ", which,
          " is not contiguous; pass tensor.contiguous()");
  require(tensor.device() == device, operation, ": the ", which, " is on ", tensor.device().str(),
          ", but this communicator moves tensors on ", device.str());
}

// The output of a gathering operation holds the inputs of so many ranks.
void check_gathered(const char* operation, const at::Tensor& output, const at::Tensor& input, int ranks) {
  check_tensor(operation, "input", input, output.device());
  require(input.scalar_type() == output.scalar_type() && output.numel() == input.numel() * ranks, operation,
          ": the output must have ", ranks, " times the input's ", input.numel(),
          " elements, of the same dtype; it has ", output.numel());
}

// Of an all_reduce of so many bytes.
int64_t all_reduce_traffic(int64_t bytes, int64_t ranks) { return 2 * (ranks - 1) * bytes / ranks; }

// One behind the other; what is left to do after each is a call of its own.
void append(TransportCalls& chain, TransportCalls next) {
  for (TransportCall& call : next.calls) chain.calls.push_back(std::move(call));
  if (!next.after) return;
  chain.calls.emplace_back([after = std::move(next.after)](Transport&, Milliseconds) {
    after();
    return detail::TransportWorkPtr();
  });
}

void check_peer(const char* operation, int peer, const Communicator& world) {
  require(peer >= 0 && peer < world.world_size() && peer != world.rank(), operation, ": rank ", world.rank(),
          " of ", world.world_size(), " has no peer ", peer);
}

}  // namespace

void Communicator::compare(const char* operation, const at::Tensor& tensor, int64_t elements, int root,
                           const CollectiveOptions& options) {
  detail::CallRecord record;
  std::strncpy(record.operation, operation, sizeof(record.operation) - 1);
  record.dtype = static_cast<int64_t>(tensor.scalar_type());
  record.elements = elements;
  record.root = root;
  state_->compare(record, options);
}

Work Communicator::all_reduce(const at::Tensor& tensor, const CollectiveOptions& options) {
  check_tensor("all_reduce", "tensor", tensor, device());
  compare("all_reduce", tensor, tensor.numel(), 0, options);
  if (tensor.numel() == 0) return {};
  const int64_t ranks = world_size();
  if (state_->needs_ordered_sum(options)) {
    const int64_t padded = round_up(tensor.numel(), ranks) * static_cast<int64_t>(tensor.element_size());
    return state_->start("all_reduce", all_reduce_traffic(padded, ranks), options,
                         detail::ordered_all_reduce(tensor, rank(), world_size()));
  }
  return state_->start("all_reduce", all_reduce_traffic(bytes_of(tensor), ranks), options,
                       TransportCall([=](Transport& transport, Milliseconds timeout) {
                         return transport.all_reduce(tensor, timeout);
                       }));
}

bool Communicator::coalesces() const {
  return state_->connection().data->coalesces() && !state_->options().ordered_sum();
}

Work Communicator::all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                        const CollectiveOptions& options) {
  detail::CallRecord record;
  std::strncpy(record.operation, "all_reduce_coalesced", sizeof(record.operation) - 1);
  record.tensors = static_cast<int64_t>(tensors.size());
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) {
    check_tensor("all_reduce", "tensor", tensor, device());
    const int64_t numbers[] = {static_cast<int64_t>(tensor.scalar_type()), tensor.numel()};
    record.elements += tensor.numel();
    record.list =
        crc32c({reinterpret_cast<const char*>(numbers), sizeof(numbers)}, static_cast<uint32_t>(record.list));
    if (tensor.numel() > 0) parts.push_back(tensor);
  }
  state_->compare(record, options);
  if (parts.empty()) return {};
  const int64_t ranks = world_size();
  const bool ordered = state_->needs_ordered_sum(options);
  int64_t bytes = 0;
  TransportCalls chain;
  for (const at::Tensor& tensor : parts) {
    const int64_t elements = ordered ? round_up(tensor.numel(), ranks) : tensor.numel();
    bytes += elements * static_cast<int64_t>(tensor.element_size());
    if (ordered) append(chain, detail::ordered_all_reduce(tensor, rank(), world_size()));
  }
  if (!ordered) {
    chain.calls.emplace_back([parts](Transport& transport, Milliseconds timeout) {
      return transport.all_reduce_coalesced(parts, timeout);
    });
  }
  return state_->start("all_reduce", all_reduce_traffic(bytes, ranks), options, std::move(chain));
}

Work Communicator::all_reduce_coalesced(const std::vector<at::Tensor>& tensors, at::ScalarType wire_dtype,
                                        const CollectiveOptions& options) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].scalar_type() == wire_dtype) {
    return all_reduce(tensors[0], options);
  }
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) {
    check_tensor("all_reduce", "tensor", tensor, device());
    elements += round_up(tensor.numel(), kWireAlignment);
  }
  const at::TensorOptions on_wire = at::TensorOptions().dtype(wire_dtype).device(device());
  const at::Tensor wire = at::empty({elements}, on_wire);
  compare("all_reduce", wire, elements, 0, options);
  if (elements == 0) return {};
  std::vector<at::Tensor> rounded;  // pieces of `wire`
  int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    rounded.push_back(wire.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += round_up(tensor.numel(), kWireAlignment);
  }
  TransportCalls chain = TransportCall(
      [=](Transport& transport, Milliseconds timeout) { return transport.all_reduce(wire, timeout); });
  if (state_->needs_ordered_sum(options)) chain = detail::ordered_all_reduce(wire, rank(), world_size());
  chain.calls.front() = [=, send = chain.calls.front()](Transport& transport, Milliseconds timeout) {
    const at::NoGradGuard no_grad;
    at::_foreach_copy_(rounded, tensors);
    return send(transport, timeout);
  };
  chain.after = [=, put_back = chain.after] {
    const at::NoGradGuard no_grad;
    if (put_back) put_back();
    at::_foreach_copy_(tensors, rounded);
  };
  return state_->start("all_reduce", all_reduce_traffic(bytes_of(wire), world_size()), options,
                       std::move(chain));
}

Work Communicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  const CollectiveOptions& options) {
  check_tensor("reduce_scatter", "output", output, device());
  check_tensor("reduce_scatter", "input", input, device());
  require(input.scalar_type() == output.scalar_type() && input.numel() == output.numel() * world_size(),
          "reduce_scatter: the input must have ", world_size(), " times the output's ", output.numel(),
          " elements, of the same dtype; it has ", input.numel());
  compare("reduce_scatter", output, output.numel(), 0, options);
  if (output.numel() == 0) return {};
  TransportCalls calls = TransportCall([=](Transport& transport, Milliseconds timeout) {
    return transport.reduce_scatter(output, input, timeout);
  });
  if (state_->needs_ordered_sum(options)) calls = detail::ordered_reduce_scatter(output, input, world_size());
  return state_->start("reduce_scatter", bytes_of(output) * (world_size() - 1), options, std::move(calls));
}

Work Communicator::all_gather(const at::Tensor& output, const at::Tensor& input,
                              const CollectiveOptions& options) {
  check_tensor("all_gather", "output", output, device());
  check_gathered("all_gather", output, input, world_size());
  compare("all_gather", input, input.numel(), 0, options);
  if (input.numel() == 0) return {};
  return state_->start("all_gather", bytes_of(input) * (world_size() - 1), options,
                       TransportCall([=](Transport& transport, Milliseconds timeout) {
                         return transport.all_gather(output, input, timeout);
                       }));
}

Work Communicator::all_gather_host(const at::Tensor& output, const at::Tensor& input,
                                   const CollectiveOptions& options) {
  check_tensor("all_gather_host", "output", output, at::kCPU);
  check_gathered("all_gather_host", output, input, world_size());
  if (input.numel() == 0) return {};
  return state_->start_gather(output, input, options);
}

Work Communicator::all_to_all(const at::Tensor& output, const at::Tensor& input,
                              const CollectiveOptions& options) {
  check_tensor("all_to_all", "input", input, device());
  const int64_t ranks = world_size();
  require(input.numel() % ranks == 0, "all_to_all: ", input.numel(),
          " elements cannot be cut into equal chunks for ", ranks, " ranks; pass counts");
  compare("all_to_all", input, input.numel(), 0, options);
  const std::vector<int64_t> counts(static_cast<size_t>(ranks), input.numel() / ranks);
  return all_to_all(output, counts, input, counts, CollectiveOptions(options).agreed(true));
}

Work Communicator::all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_counts,
                              const at::Tensor& input, const std::vector<int64_t>& input_counts,
                              const CollectiveOptions& options) {
  check_tensor("all_to_all", "output", output, device());
  check_tensor("all_to_all", "input", input, device());
  const auto check_counts = [&](const char* which, const at::Tensor& tensor,
                                const std::vector<int64_t>& counts) {
    bool fit = counts.size() == static_cast<size_t>(world_size()) && sum(counts) == tensor.numel();
    for (const int64_t count : counts) fit = fit && count >= 0;
    require(fit, "all_to_all: the counts of the ", which, " must be one number >= 0 for each of ",
            world_size(), " ranks, ", tensor.numel(), " in all");
  };
  check_counts("output", output, output_counts);
  check_counts("input", input, input_counts);
  require(input.scalar_type() == output.scalar_type(), "all_to_all: the output is ", output.scalar_type(),
          ", but the input is ", input.scalar_type());
  compare("all_to_all", input, -1, 0, options);  // sizes may differ
  const int64_t own = input_counts[static_cast<size_t>(rank())];
  return state_->start("all_to_all", (input.numel() - own) * static_cast<int64_t>(input.element_size()),
                       options, TransportCall([=](Transport& transport, Milliseconds timeout) {
                         return transport.all_to_all(output, output_counts, input, input_counts, timeout);
                       }));
}

Work Communicator::broadcast(const at::Tensor& tensor, int root, const CollectiveOptions& options) {
  check_tensor("broadcast", "tensor", tensor, device());
  require(root >= 0 && root < world_size(), "broadcast: rank ", root, " does not exist in a world of ",
          world_size());
  compare("broadcast", tensor, tensor.numel(), root, options);
  if (tensor.numel() == 0) return {};
  const int64_t bytes = rank() == root && world_size() > 1 ? bytes_of(tensor) : 0;
  return state_->start("broadcast", bytes, options,
                       TransportCall([=](Transport& transport, Milliseconds timeout) {
                         return transport.broadcast(tensor, root, timeout);
                       }));
}

Work Communicator::send_receive(const std::vector<Message>& messages, const CollectiveOptions& options) {
  std::vector<Message> real;
  int64_t bytes = 0;
  bool sends = false;
  for (const Message& message : messages) {
    const char* const operation = message.is_sent ? "send" : "receive";
    check_tensor(operation, "tensor", message.tensor, device());
    check_peer(operation, message.peer, *this);
    if (message.tensor.numel() == 0) continue;
    real.push_back(message);
    sends = sends || message.is_sent;
    if (message.is_sent) bytes += bytes_of(message.tensor);
  }
  if (real.empty()) return {};
  return state_->start(sends ? "send" : "receive", bytes, options,
                       TransportCall([real = std::move(real)](Transport& transport, Milliseconds timeout) {
                         return transport.exchange(real, timeout);
                       }));
}

std::vector<std::string> Communicator::exchange(const std::string& text, const CollectiveOptions& options) {
  return detail::gather_texts(text, world_size(), [&](const at::Tensor& all, const at::Tensor& own) {
    all_gather_host(all, own, options).wait();
  });
}

void Work::wait() {
  if (is_empty()) return;
  try {
    queued_->wait();
  } catch (const std::exception& error) {
    state_->fail(operation_, sequence_, error.what());
  }
}

bool Work::is_done() const { return is_empty() || queued_->is_done(); }

}  // namespace pacer

namespace pacer::detail {

Work CommunicatorState::start_gather(const at::Tensor& output, const at::Tensor& input,
                                     const CollectiveOptions& options) {
  const int64_t sent = static_cast<int64_t>(input.nbytes()) * (connection_.world_size - 1);
  return start_on(messages_, "agreement", sent, options, gather_calls(connection_, output, input));
}

Work CommunicatorState::start_on(OperationQueue& queue, const char* operation, int64_t bytes,
                                 const CollectiveOptions& options, TransportCalls calls) {
  world_->count(counted_as_, operation, bytes);
  int64_t sequence = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    sequence = ++sequence_;
  }
  try {
    return {shared_from_this(), operation, sequence, queue.start(std::move(calls), timeout_of(options))};
  } catch (const std::exception& error) {
    fail(operation, sequence, error.what());
  }
}

}  // namespace pacer::detail
