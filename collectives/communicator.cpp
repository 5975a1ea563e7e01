#include <pacer/collectives/communicator.h>

#include <cstdio>
#include <utility>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include <pacer/collectives/detail/alone_transport.h>
#include <pacer/collectives/detail/communicator_state.h>
#include <pacer/collectives/detail/connect.h>
#include <pacer/collectives/detail/in_process_transport.h>
#include <pacer/collectives/detail/process_identity.h>
#include <pacer/collectives/launch_environment.h>
#include <pacer/core/error.h>
#include <pacer/core/version.h>

namespace pacer {

namespace {

void check_options(const CommunicatorOptions& options, int world_size) {
  require(options.timeout().count() > 0, "a communicator needs a timeout > 0, not ",
          options.timeout().count(), " ms");
  require(options.listen_address() != "",
          "listen_address is empty; name an address of this host, or leave it out");
  const int ranks_per_node = options.ranks_per_node().value_or(1);
  require(ranks_per_node >= 1, "ranks_per_node must be at least 1, not ", ranks_per_node);
  require(world_size % ranks_per_node == 0, world_size, " ranks cannot be nodes of ", ranks_per_node,
          " each; set ranks_per_node to a divisor");
}

std::shared_ptr<Communicator> meet(const detail::RendezvousSettings& settings,
                                   const CommunicatorOptions& options) {
  check_options(options, settings.world_size);
  require(settings.world_size >= 1, "a world needs at least 1 rank, not ", settings.world_size);
  require(settings.rank >= 0 && settings.rank < settings.world_size, "rank ", settings.rank,
          " does not exist in a world of ", settings.world_size);
  if (settings.world_size == 1) {
    return std::make_shared<Communicator>(detail::connect_one(options), CommunicatorOptions());
  }
  auto world = std::make_shared<Communicator>(detail::connect(settings, options), options);
  if (world->rank() == 0) {
    std::fprintf(stderr, "pacer %s: %d processes joined by %s, LibTorch %s\n", version(), world->world_size(),
                 world->backend_name().c_str(), TORCH_VERSION);
  }
  return world;
}

}  // namespace

std::shared_ptr<Communicator> Communicator::from_environment(const CommunicatorOptions& options) {
  const LaunchEnvironment launch = read_launch_environment();
  detail::RendezvousSettings settings;
  settings.rank = launch.rank;
  settings.world_size = launch.world_size;
  settings.local_rank = launch.local_rank;
  settings.local_size = launch.local_size;
  settings.host = launch.host;
  settings.port = launch.port;
  settings.store_is_hosted = launch.store_is_hosted;
  if (launch.host.empty() && launch.world_size > 1) settings.file = detail::rendezvous_file(launch.job);
  return meet(settings, options);
}

std::shared_ptr<Communicator> Communicator::from_file(const std::string& path, int rank, int world_size,
                                                      const CommunicatorOptions& options) {
  require(!path.empty(), "Communicator::from_file needs the path of a file; it is empty");
  detail::RendezvousSettings settings;
  settings.rank = settings.local_rank = rank;
  settings.world_size = settings.local_size = world_size;
  settings.file = path;
  return meet(settings, options);
}

std::shared_ptr<Communicator> Communicator::from_address(const std::string& host, int port, int rank,
                                                         int world_size, const CommunicatorOptions& options) {
  require(!host.empty(), "Communicator::from_address needs a host; it is empty");
  require(port > 0 && port < 65536, "Communicator::from_address needs a port in 1 ... 65535, not ", port);
  detail::RendezvousSettings settings;
  settings.rank = settings.local_rank = rank;
  settings.world_size = settings.local_size = world_size;
  settings.host = host;
  settings.port = port;
  return meet(settings, options);
}

std::shared_ptr<Communicator> Communicator::alone(at::Device device) {
  if (device.is_cuda()) {
    const int gpus = at::hasCUDA() ? c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount() : 0;
    require<Unavailable>(device.index() < gpus && gpus > 0, "Communicator::alone(", device.str(),
                         "): this LibTorch sees ", gpus, " GPUs");
  }
  return std::make_shared<Communicator>(detail::connect_alone(device), CommunicatorOptions());
}

std::vector<std::shared_ptr<Communicator>> Communicator::in_process(int world_size,
                                                                    const CommunicatorOptions& options) {
  check_options(options, world_size);
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (detail::Connection& connection :
       detail::connect_in_process(world_size, options.ranks_per_node().value_or(0))) {
    ranks.push_back(std::make_shared<Communicator>(std::move(connection), options));
  }
  return ranks;
}

namespace {

std::shared_ptr<detail::CommunicatorState> make_state(detail::Connection connection,
                                                      CommunicatorOptions options) {
  const auto world = std::make_shared<detail::World>(connection.rank_health, connection.rank,
                                                     connection.world_size, connection.joins_processes);
  if (connection.ranks_per_node > 0) connection.node = connection.rank / connection.ranks_per_node;
  std::vector<int> ranks = detail::all_ranks(connection.world_size);
  return std::make_shared<detail::CommunicatorState>(std::move(connection), std::move(options), world,
                                                     std::move(ranks));
}

int node_size(const Communicator& world, const char* what) {
  require(world.ranks_per_node() > 0, what,
          " needs nodes of as many ranks each, whose ranks follow one another, but this run's do not; start "
          "as many ranks on every machine, machine by machine, or set ranks_per_node");
  return world.ranks_per_node();
}

}  // namespace

Communicator::Communicator(detail::Connection connection, CommunicatorOptions options)
    : state_(make_state(std::move(connection), std::move(options))) {}
Communicator::~Communicator() = default;

bool Communicator::joins_processes() { return detail::World::joins_processes(); }

int Communicator::rank() const { return state_->connection().rank; }
int Communicator::world_size() const { return state_->connection().world_size; }
int Communicator::rank_in_world(int rank) const { return state_->rank_in_world(rank); }
const std::string& Communicator::name() const { return state_->name(); }
int Communicator::local_rank() const { return state_->connection().local_rank; }
int Communicator::local_size() const { return state_->connection().local_size; }
int Communicator::ranks_per_node() const { return state_->connection().ranks_per_node; }
at::Device Communicator::device() const { return state_->connection().data->device(); }
std::string Communicator::backend_name() const { return state_->connection().data->name(); }
const CommunicatorOptions& Communicator::options() const { return state_->options(); }

std::shared_ptr<Communicator> Communicator::split(int color, int key, const std::string& name) {
  auto group = state_->split(color, key, name);
  return group == nullptr ? nullptr : std::make_shared<Communicator>(std::move(group));
}

std::shared_ptr<Communicator> Communicator::lane(const std::string& name) {
  require(!name.empty(), "a lane needs a name");
  return state_->kept("lane " + name, 0);
}

std::shared_ptr<Communicator> Communicator::node() {
  return state_->kept("node", rank() / node_size(*this, "node()"));
}

std::shared_ptr<Communicator> Communicator::between_nodes() {
  return state_->kept("between nodes", rank() % node_size(*this, "between_nodes()"));
}

void Communicator::barrier(const CollectiveOptions& options) {
  const at::Tensor own = at::empty({1}, at::kByte), all = at::empty({world_size()}, at::kByte);
  own.zero_();
  all_gather_host(all, own, options).wait();
}

Work Communicator::send(const at::Tensor& tensor, int to, const CollectiveOptions& options) {
  return send_receive({Message::send(tensor, to)}, options);
}

Work Communicator::receive(const at::Tensor& tensor, int from, const CollectiveOptions& options) {
  return send_receive({Message::receive(tensor, from)}, options);
}

void Communicator::leave(const std::string& reason) noexcept { state_->world()->leave(reason); }
void Communicator::abort() noexcept { state_->world()->abort(); }
void Communicator::check() {
  state_->world()->check([&](const std::string& cause) { state_->fail("an operation under way", 0, cause); });
}
bool Communicator::has_failed() const { return state_->world()->has_failed(); }
void Communicator::set_step(int64_t step) { state_->world()->set_step(step); }
void Communicator::set_phase(const std::string& phase) { state_->world()->set_phase(phase); }
std::vector<Traffic> Communicator::traffic() const { return state_->world()->traffic(); }

int64_t Communicator::bytes_sent() const {
  int64_t bytes = 0;
  for (const Traffic& entry : traffic()) bytes += entry.bytes_sent;
  return bytes;
}

}  // namespace pacer
