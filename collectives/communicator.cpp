#include <pacer/collectives/communicator.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/version.h>

#include <pacer/collectives/detail/alone_transport.h>
#include <pacer/collectives/detail/communicator_state.h>
#include <pacer/collectives/detail/connect.h>
#include <pacer/collectives/detail/in_process_transport.h>
#include <pacer/collectives/detail/ordered_sum.h>
#include <pacer/collectives/detail/tensor_check.h>
#include <pacer/collectives/launch_environment.h>
#include <pacer/core/error.h>
#include <pacer/core/tile.h>
#include <pacer/core/version.h>

namespace pacer {

using detail::bytes_of;
using detail::check_tensor;

namespace {

std::atomic<int> process_communicators{0};  // that are alive and join several processes

int64_t sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

void check_options(const CommunicatorOptions& options, int world_size) {
  require(options.timeout().count() > 0, "a communicator needs a timeout > 0, not ",
          options.timeout().count(), " ms");
  const int ranks_per_node = options.ranks_per_node();
  require(ranks_per_node >= 0, "ranks_per_node must be 0 or more, not ", ranks_per_node);
  require(ranks_per_node == 0 || world_size % ranks_per_node == 0, world_size, " ranks cannot be nodes of ",
          ranks_per_node, " each; set ranks_per_node to a divisor");
}

std::shared_ptr<Communicator> meet(const detail::Meeting& meeting, const CommunicatorOptions& options) {
  check_options(options, meeting.world_size);
  require(meeting.world_size >= 1, "a world needs at least 1 rank, not ", meeting.world_size);
  require(meeting.rank >= 0 && meeting.rank < meeting.world_size, "rank ", meeting.rank,
          " does not exist in a world of ", meeting.world_size);
  if (meeting.world_size == 1) {
    return std::make_shared<Communicator>(detail::connect_one(options), CommunicatorOptions());
  }
  auto world = std::make_shared<Communicator>(detail::connect(meeting, options), options);
  if (world->rank() == 0) {
    std::fprintf(stderr, "pacer %s: %d processes joined by %s, LibTorch %s\n", version(), world->world_size(),
                 world->backend_name().c_str(), TORCH_VERSION);
  }
  return world;
}

}  // namespace

std::shared_ptr<Communicator> Communicator::from_environment(const CommunicatorOptions& options) {
  const LaunchEnvironment launch = read_launch_environment();
  detail::Meeting meeting;
  meeting.rank = launch.rank;
  meeting.world_size = launch.world_size;
  meeting.local_rank = launch.local_rank;
  meeting.local_size = launch.local_size;
  meeting.host = launch.host;
  meeting.port = launch.port;
  meeting.store_is_hosted = launch.store_is_hosted;
  if (launch.host.empty() && launch.world_size > 1) meeting.file = detail::rendezvous_file(launch.job);
  return meet(meeting, options);
}

std::shared_ptr<Communicator> Communicator::from_file(const std::string& path, int rank, int world_size,
                                                      const CommunicatorOptions& options) {
  require(!path.empty(), "Communicator::from_file needs the path of a file; it is empty");
  detail::Meeting meeting;
  meeting.rank = meeting.local_rank = rank;
  meeting.world_size = meeting.local_size = world_size;
  meeting.file = path;
  return meet(meeting, options);
}

std::shared_ptr<Communicator> Communicator::from_address(const std::string& host, int port, int rank,
                                                         int world_size, const CommunicatorOptions& options) {
  require(!host.empty(), "Communicator::from_address needs a host; it is empty");
  require(port > 0 && port < 65536, "Communicator::from_address needs a port in 1 ... 65535, not ", port);
  detail::Meeting meeting;
  meeting.rank = meeting.local_rank = rank;
  meeting.world_size = meeting.local_size = world_size;
  meeting.host = host;
  meeting.port = port;
  return meet(meeting, options);
}

std::shared_ptr<Communicator> Communicator::alone(at::Device device) {
  return std::make_shared<Communicator>(detail::connect_alone(device), CommunicatorOptions());
}

std::vector<std::shared_ptr<Communicator>> Communicator::in_process(int world_size,
                                                                    const CommunicatorOptions& options) {
  check_options(options, world_size);
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (detail::Connection& connection : detail::connect_in_process(world_size, options.ranks_per_node())) {
    ranks.push_back(std::make_shared<Communicator>(std::move(connection), options));
  }
  return ranks;
}

Communicator::Communicator(detail::Connection connection, CommunicatorOptions options)
    : state_(std::make_shared<detail::CommunicatorState>(std::move(connection), std::move(options))) {
  if (state_->connection().joins_processes) ++process_communicators;
}
Communicator::~Communicator() {
  if (state_->connection().joins_processes) --process_communicators;
}

bool Communicator::joins_processes() { return process_communicators > 0; }

int Communicator::rank() const { return state_->connection().rank; }
int Communicator::world_size() const { return state_->connection().world_size; }
int Communicator::local_rank() const { return state_->connection().local_rank; }
int Communicator::local_size() const { return state_->connection().local_size; }
int Communicator::ranks_per_node() const { return state_->connection().ranks_per_node; }
at::Device Communicator::device() const { return state_->connection().data->device(); }
std::string Communicator::backend_name() const { return state_->connection().data->name(); }
const CommunicatorOptions& Communicator::options() const { return state_->options(); }

void Communicator::compare(const char* operation, const at::Tensor& tensor, int64_t elements, int root,
                           const CollectiveOptions& options) {
  if (world_size() == 1 || options.agreed() || !state_->options().check_calls()) return;
  detail::CallRecord record;
  std::strncpy(record.operation, operation, sizeof(record.operation) - 1);
  record.dtype = static_cast<int64_t>(tensor.scalar_type());
  record.elements = elements;
  record.root = root;
  state_->compare(record, state_->timeout_of(options));
}

Work Communicator::all_reduce(const at::Tensor& tensor, const CollectiveOptions& options) {
  check_tensor("all_reduce", "tensor", tensor, device());
  compare("all_reduce", tensor, tensor.numel(), 0, options);
  if (tensor.numel() == 0) return {};
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;
  const int64_t world = world_size();
  if (state_->options().ordered_sum() && !transport->sums_in_rank_order()) {
    const int64_t padded = round_up(tensor.numel(), world) * static_cast<int64_t>(tensor.element_size());
    return state_->start("all_reduce", 2 * (world - 1) * padded / world,
                         detail::ordered_all_reduce(transport, tensor, rank(), world_size(), timeout));
  }
  return state_->start("all_reduce", 2 * (world - 1) * bytes_of(tensor) / world,
                       {{[=] { return transport->all_reduce(tensor, timeout); }}, nullptr});
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
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;
  const int64_t bytes = bytes_of(output) * (world_size() - 1);
  if (state_->options().ordered_sum() && !transport->sums_in_rank_order()) {
    return state_->start(
        "reduce_scatter", bytes,
        detail::ordered_reduce_scatter(transport, output, input, rank(), world_size(), timeout));
  }
  return state_->start("reduce_scatter", bytes,
                       {{[=] { return transport->reduce_scatter(output, input, timeout); }}, nullptr});
}

Work Communicator::all_gather(const at::Tensor& output, const at::Tensor& input,
                              const CollectiveOptions& options) {
  check_tensor("all_gather", "output", output, device());
  detail::check_gathered("all_gather", output, input, world_size());
  compare("all_gather", input, input.numel(), 0, options);
  if (input.numel() == 0) return {};
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;
  return state_->start("all_gather", bytes_of(input) * (world_size() - 1),
                       {{[=] { return transport->all_gather(output, input, timeout); }}, nullptr});
}

Work Communicator::all_gather_host(const at::Tensor& output, const at::Tensor& input,
                                   const CollectiveOptions& options) {
  check_tensor("all_gather_host", "output", output, at::kCPU);
  detail::check_gathered("all_gather_host", output, input, world_size());
  if (input.numel() == 0) return {};
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().control;
  return state_->start_message("agreement", bytes_of(input) * (world_size() - 1),
                               [=] { return transport->all_gather(output, input, timeout); });
}

Work Communicator::all_to_all(const at::Tensor& output, const at::Tensor& input,
                              const CollectiveOptions& options) {
  check_tensor("all_to_all", "input", input, device());
  const int64_t world = world_size();
  require(input.numel() % world == 0, "all_to_all: ", input.numel(),
          " elements cannot be cut into equal chunks for ", world, " ranks; pass counts");
  compare("all_to_all", input, input.numel(), 0, options);
  const std::vector<int64_t> counts(static_cast<size_t>(world), input.numel() / world);
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
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;
  const int64_t own = input_counts[static_cast<size_t>(rank())];
  const int64_t bytes = (input.numel() - own) * static_cast<int64_t>(input.element_size());
  const auto exchange = [=] {
    return transport->all_to_all(output, output_counts, input, input_counts, timeout);
  };
  return state_->start("all_to_all", bytes, {{exchange}, nullptr});
}

Work Communicator::broadcast(const at::Tensor& tensor, int root, const CollectiveOptions& options) {
  check_tensor("broadcast", "tensor", tensor, device());
  require(root >= 0 && root < world_size(), "broadcast: rank ", root, " does not exist in a world of ",
          world_size());
  compare("broadcast", tensor, tensor.numel(), root, options);
  if (tensor.numel() == 0) return {};
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;
  const int64_t bytes = rank() == root && world_size() > 1 ? bytes_of(tensor) : 0;
  return state_->start("broadcast", bytes,
                       {{[=] { return transport->broadcast(tensor, root, timeout); }}, nullptr});
}

void Communicator::barrier(const CollectiveOptions& options) {
  const at::Tensor own = at::empty({1}, at::kByte), all = at::empty({world_size()}, at::kByte);
  own.zero_();
  all_gather_host(all, own, options).wait();
}

namespace {

void check_peer(const char* operation, int peer, const Communicator& world) {
  require(peer >= 0 && peer < world.world_size() && peer != world.rank(), operation, ": rank ", world.rank(),
          " of ", world.world_size(), " has no peer ", peer);
}

}  // namespace

Work Communicator::send(const at::Tensor& tensor, int to, const CollectiveOptions& options) {
  check_tensor("send", "tensor", tensor, device());
  check_peer("send", to, *this);
  if (tensor.numel() == 0) return {};
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;
  return state_->start("send", bytes_of(tensor),
                       {{[=] { return transport->send(tensor, to, timeout); }}, nullptr});
}

Work Communicator::receive(const at::Tensor& tensor, int from, const CollectiveOptions& options) {
  check_tensor("receive", "tensor", tensor, device());
  check_peer("receive", from, *this);
  if (tensor.numel() == 0) return {};
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;
  return state_->start("receive", 0, {{[=] { return transport->receive(tensor, from, timeout); }}, nullptr});
}

Work Communicator::send_receive(const at::Tensor& sent, int to, const at::Tensor& received, int from,
                                const CollectiveOptions& options) {
  check_tensor("send_receive", "sent tensor", sent, device());
  check_tensor("send_receive", "received tensor", received, device());
  check_peer("send_receive", to, *this);
  check_peer("send_receive", from, *this);
  if (sent.numel() == 0 && received.numel() == 0) return {};
  require(sent.numel() > 0 && received.numel() > 0,
          "send_receive: both tensors must have elements, or neither; use send or receive alone");
  const auto timeout = state_->timeout_of(options);
  const auto transport = state_->connection().data;
  const auto both = [=] { return detail::send_and_receive(*transport, sent, to, received, from, timeout); };
  return state_->start("send", bytes_of(sent), {{both}, nullptr});
}

std::vector<std::string> Communicator::exchange(const std::string& text, const CollectiveOptions& options) {
  const int64_t world = world_size();
  const at::Tensor length = at::empty({1}, at::kLong), lengths = at::empty({world}, at::kLong);
  length.fill_(static_cast<int64_t>(text.size()));
  all_gather_host(lengths, length, options).wait();
  const auto* sizes = lengths.const_data_ptr<int64_t>();
  const int64_t longest = *std::max_element(sizes, sizes + world);
  const at::Tensor own = at::empty({longest}, at::kByte), all = at::empty({world * longest}, at::kByte);
  if (!text.empty()) std::memcpy(own.mutable_data_ptr(), text.data(), text.size());
  all_gather_host(all, own, options).wait();
  std::vector<std::string> texts;
  const auto* bytes = static_cast<const char*>(all.const_data_ptr());
  for (int64_t r = 0; r < world; ++r) {
    texts.emplace_back(bytes + r * longest, static_cast<size_t>(sizes[r]));
  }
  return texts;
}

void Communicator::leave(const std::string& reason) noexcept { state_->leave(reason); }
void Communicator::abort() noexcept { state_->abort(); }
void Communicator::check() { state_->check(); }
bool Communicator::has_failed() const { return state_->has_failed(); }
void Communicator::set_step(int64_t step) { state_->set_step(step); }
void Communicator::set_phase(const std::string& phase) { state_->set_phase(phase); }
std::vector<Traffic> Communicator::traffic() const { return state_->traffic(); }

int64_t Communicator::bytes_sent() const {
  int64_t bytes = 0;
  for (const Traffic& entry : traffic()) bytes += entry.bytes_sent;
  return bytes;
}

}  // namespace pacer
