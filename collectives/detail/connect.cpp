#include <pacer/collectives/detail/connect.h>

#include <utility>
#include <vector>

#include <pacer/collectives/communication_error.h>
#include <pacer/collectives/detail/alone_transport.h>
#include <pacer/collectives/detail/gather.h>
#include <pacer/collectives/detail/gloo_transport.h>
#include <pacer/collectives/detail/rank_devices.h>
#include <pacer/collectives/detail/rendezvous.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>

namespace pacer::detail {
namespace {

// Everything that goes wrong while ranks connect, as one error.
template <class F>
auto set_up(const char* what, const Rendezvous& met, const F& make) {
  try {
    return make();
  } catch (const CommunicationError&) {
    throw;
  } catch (const Unavailable&) {
    throw;
  } catch (const std::exception& error) {
    met.rank_health->require_all_alive();
    fail_rendezvous(concatenate("the ranks that met at ", met.place, " could not be joined by ", what, ": ",
                                first_line(error.what()), "; see what the other ranks printed"));
  }
}

at::Device gpu(int64_t number) { return {at::kCUDA, static_cast<c10::DeviceIndex>(number)}; }

// What a process needs to join others of its world in one more communicator.
struct Joiner {
  GlooSetup gloo;  // gather, rank and world_size are each communicator's own
  at::Device device = at::kCPU;
  std::shared_ptr<RankHealth> rank_health;

  // Over ranks that are connected already by `control`; `in_world`: their numbers in the world.
  std::shared_ptr<Transport> join_data(const std::shared_ptr<Transport>& control, int rank,
                                       const std::vector<int>& in_world) const {
    const int world_size = static_cast<int>(in_world.size());
    if (device.is_cpu()) return join_gloo(gather_over(control, world_size, gloo.timeout), rank, world_size);
    return make_nccl_transport(control, rank, world_size, device, gloo.timeout, rank_health->is_one_host(),
                               [rank_health = rank_health, in_world]() -> std::optional<std::string> {
                                 const auto trouble = rank_health->find_trouble(in_world);
                                 return trouble ? std::make_optional(trouble->text) : std::nullopt;
                               });
  }

  std::shared_ptr<Transport> join_gloo(Gather gather, int rank, int world_size) const {
    GlooSetup setup = gloo;
    setup.gather = std::move(gather);
    setup.rank = rank;
    setup.world_size = world_size;
    return make_gloo_transport(setup);
  }

  // Connection::join of ranks that are connected by `control`.
  std::function<Connection(const GroupMembership&)> over(const std::shared_ptr<Transport>& control,
                                                         int world_size) const {
    return [joiner = *this, control, world_size](const GroupMembership& membership) {
      const Gather of_all = gather_over(control, world_size, joiner.gloo.timeout);
      if (membership.members.size() <= 1) {
        of_all("");  // the others need to hear from everybody
        return membership.members.empty() ? Connection() : connect_alone(joiner.device);
      }
      const Gather of_members = [&](const std::string& own) {
        const std::vector<std::string> all = of_all(own);
        std::vector<std::string> texts;
        for (const int member : membership.members) texts.push_back(all[static_cast<size_t>(member)]);
        return texts;
      };
      const int size = static_cast<int>(membership.members.size());
      Connection group;
      group.control = joiner.join_gloo(of_members, membership.rank, size);
      group.data = joiner.join_data(group.control, membership.rank, membership.in_world);
      group.join = joiner.over(group.control, size);
      return group;
    };
  }
};

}  // namespace

Connection connect_one(const CommunicatorOptions& options) {
  const ProcessDevices devices = devices_of_process();
  if (choose_backend(options.backend(), devices, 1) == CommunicatorBackend::gloo)
    return connect_alone(at::kCPU);
  const int64_t number = gpu_of(options, devices, 0);
  require(number >= 0 && number < devices.gpus, "CommunicatorOptions::gpu is ", number,
          ", but this process sees ", devices.gpus, " GPUs");
  return connect_alone(gpu(number));
}

Connection connect(const RendezvousSettings& settings, const CommunicatorOptions& options) {
  // What cannot work is refused before anybody waits for this rank.
  const ProcessDevices devices = devices_of_process();
  const CommunicatorBackend backend = choose_backend(options.backend(), devices, settings.world_size);
  const Rendezvous met = rendezvous(settings, options);

  Connection connection;
  connection.rank = settings.rank;
  connection.world_size = settings.world_size;
  connection.local_rank = settings.local_rank;
  connection.local_size = settings.local_size;
  connection.rank_health = met.rank_health;
  connection.joins_processes = settings.world_size > 1;
  if (settings.local_size == settings.world_size && !met.rank_health->is_one_host()) {
    // The caller, who named an address only, cannot know.
    connection.local_rank = met.rank_health->local_rank();
    connection.local_size = met.rank_health->local_size();
  }

  connection.host = met.rank_health->first_local_rank();
  Joiner joiner;
  joiner.gloo.address = met.address;
  joiner.gloo.timeout = options.timeout();
  joiner.gloo.one_host = met.rank_health->is_one_host();
  joiner.rank_health = met.rank_health;
  connection.control =
      set_up("Gloo", met, [&] { return joiner.join_gloo(met.gather, settings.rank, settings.world_size); });

  RankDevice own;
  own.wanted_ranks_per_node = options.ranks_per_node().value_or(0);
  own.local_rank = connection.local_rank;
  own.local_size = connection.local_size;
  if (backend == CommunicatorBackend::nccl) {
    own.on_gpu = 1;
    own.gpus = devices.gpus;
    own.gpu = gpu_of(options, devices, connection.local_rank);
    if (own.gpu >= 0 && own.gpu < own.gpus) own.gpu_id = kernels::gpu_id(static_cast<int>(own.gpu));
  }
  const std::vector<RankDevice> places = set_up("Gloo", met, [&] {
    return gather_values(own, settings.world_size, [&](const at::Tensor& all, const at::Tensor& one) {
      connection.control->all_gather(all, one, options.timeout())->wait();
    });
  });
  check_devices(places);
  connection.ranks_per_node = ranks_of_nodes(places);
  if (backend == CommunicatorBackend::nccl) {
    joiner.device = gpu(own.gpu);
    set_gpu(joiner.device);
  }
  connection.data = set_up(backend == CommunicatorBackend::nccl ? "NCCL" : "Gloo", met, [&] {
    return joiner.join_data(connection.control, settings.rank, all_ranks(settings.world_size));
  });
  connection.join = joiner.over(connection.control, settings.world_size);
  met.shorten_timeout();
  return connection;
}

}  // namespace pacer::detail
