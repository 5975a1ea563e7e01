#include <pacer/collectives/detail/connect.h>

#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>

#include <pacer/collectives/communication_error.h>
#include <pacer/collectives/detail/alone_transport.h>
#include <pacer/collectives/detail/cuda_devices.h>
#include <pacer/collectives/detail/gloo_transport.h>
#include <pacer/collectives/detail/rank_places.h>
#include <pacer/collectives/detail/rendezvous.h>
#include <pacer/core/error.h>

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
    met.roster->require_all_alive();
    const std::string words = error.what();
    throw CommunicationError(
        concatenate("the ranks that met at ", met.place, " could not be joined by ", what, ": ",
                    words.substr(0, words.find('\n')), "; see what the other ranks printed"),
        "rendezvous", 0, -1, {});
  }
}

// Of all ranks, in their order.
std::vector<RankPlaceFacts> exchange_places(const Connection& connection, const RankPlaceFacts& own,
                                            std::chrono::milliseconds timeout) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(RankPlaceFacts));
  const at::Tensor mine = at::empty({kBytes}, at::kByte);
  const at::Tensor all = at::empty({connection.world_size * kBytes}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), &own, sizeof own);
  connection.control->all_gather(all, mine, timeout)->wait();
  std::vector<RankPlaceFacts> places(static_cast<size_t>(connection.world_size));
  std::memcpy(places.data(), all.const_data_ptr(), static_cast<size_t>(all.numel()));
  return places;
}

at::Device gpu(int64_t number) { return {at::kCUDA, static_cast<c10::DeviceIndex>(number)}; }

}  // namespace

Connection connect_one(const CommunicatorOptions& options) {
  const Equipment equipment = equipment_of_process();
  if (choose_backend(options.backend(), equipment, 1) == Backend::gloo) return connect_alone(at::kCPU);
  const int64_t number = gpu_of(options, equipment, 0);
  require(number >= 0 && number < equipment.gpus, "CommunicatorOptions::gpu is ", number,
          ", but this process sees ", equipment.gpus, " GPUs");
  return connect_alone(gpu(number));
}

Connection connect(const Meeting& meeting, const CommunicatorOptions& options) {
  // What cannot work is refused before anybody waits for this rank.
  const Equipment equipment = equipment_of_process();
  const Backend backend = choose_backend(options.backend(), equipment, meeting.world_size);
  const Rendezvous met = meet(meeting, options);

  Connection connection;
  connection.rank = meeting.rank;
  connection.world_size = meeting.world_size;
  connection.local_rank = meeting.local_rank;
  connection.local_size = meeting.local_size;
  connection.roster = met.roster;
  connection.joins_processes = meeting.world_size > 1;
  if (meeting.local_size == meeting.world_size && !met.roster->is_one_host()) {
    // The caller, who named an address only, cannot know.
    connection.local_rank = met.roster->local_rank();
    connection.local_size = met.roster->local_size();
  }

  GlooSetup gloo;
  gloo.gather = met.gather;
  gloo.rank = meeting.rank;
  gloo.world_size = meeting.world_size;
  gloo.address = met.address;
  gloo.timeout = options.timeout();
  connection.control = set_up("Gloo", met, [&] { return make_gloo_transport(gloo); });

  RankPlaceFacts own;
  own.wanted_ranks_per_node = options.ranks_per_node();
  own.local_rank = connection.local_rank;
  own.local_size = connection.local_size;
  if (backend == Backend::nccl) {
    own.on_gpu = 1;
    own.gpus = equipment.gpus;
    own.gpu = gpu_of(options, equipment, connection.local_rank);
    if (own.gpu >= 0 && own.gpu < own.gpus) own.gpu_id = cuda_device_id(static_cast<int>(own.gpu));
  }
  const std::vector<RankPlaceFacts> places =
      set_up("Gloo", met, [&] { return exchange_places(connection, own, options.timeout()); });
  check_places(places);
  connection.ranks_per_node = ranks_of_nodes(places);
  if (backend == Backend::gloo) {
    gloo.gather = gather_over(connection.control, meeting.world_size, options.timeout());
    connection.data = set_up("Gloo", met, [&] { return make_gloo_transport(gloo); });
  } else {
    set_cuda_device(static_cast<int>(own.gpu));
    connection.data = set_up("NCCL", met, [&] {
      const RankPlace place{meeting.rank, meeting.world_size, connection.ranks_per_node};
      return make_nccl_transport(
          connection.control, place, gpu(own.gpu), options.timeout(), met.roster->is_one_host(),
          [roster = met.roster, all = all_ranks(meeting.world_size)]() -> std::optional<std::string> {
            const auto trouble = roster->find_trouble(all);
            return trouble ? std::make_optional(trouble->text) : std::nullopt;
          });
    });
  }
  met.settle();
  return connection;
}

}  // namespace pacer::detail
