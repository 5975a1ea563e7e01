#include <pacer/collectives/detail/connect.h>

#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>

#include <pacer/collectives/communication_error.h>
#include <pacer/collectives/detail/cuda_devices.h>
#include <pacer/collectives/detail/gloo_transport.h>
#include <pacer/collectives/detail/rendezvous.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// Why an operation of NCCL cannot end any more. NCCL does not notice that a peer has gone; the board does.
std::optional<std::string> find_trouble(const Rendezvous& met, int rank, int world_size) {
  try {
    for (int other = 0; other < world_size; ++other) {
      if (other == rank) continue;
      if (const auto reason = met.board->read(concatenate("left/", other))) {
        return concatenate("rank ", other, " left: ", *reason);
      }
    }
  } catch (const std::exception& error) {
    return concatenate(
        "rank 0, or the launcher, has ended: the store where the ranks met cannot be reached (", error.what(),
        ")");
  }
  return std::nullopt;
}

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
    met.roll->require_all_alive();
    const std::string words = error.what();
    throw CommunicationError(
        concatenate("the ranks that met at ", met.place, " could not be joined by ", what, ": ",
                    words.substr(0, words.find('\n')), "; see what the other ranks printed"),
        "rendezvous", 0, -1, {});
  }
}

// What a rank knows of its place.
struct Place {
  int64_t wanted;  // CommunicatorOptions::ranks_per_node
  int64_t local_size, local_rank;
};
constexpr int64_t kPlaceNumbers = sizeof(Place) / sizeof(int64_t);

// Of all ranks, in their order: kPlaceNumbers for each.
at::Tensor places_of_ranks(const Connection& connection, const CommunicatorOptions& options) {
  const Place own{options.ranks_per_node(), connection.local_size, connection.local_rank};
  const at::Tensor mine = at::empty({kPlaceNumbers}, at::kLong);
  const at::Tensor all = at::empty({connection.world_size * kPlaceNumbers}, at::kLong);
  std::memcpy(mine.mutable_data_ptr<int64_t>(), &own, sizeof own);
  connection.control->all_gather(all, mine, options.timeout())->wait();
  return all;
}

// How many ranks each node has; 0 where not all have as many, in a row.
int ranks_of_nodes(const at::Tensor& all) {
  const auto* places = reinterpret_cast<const Place*>(all.const_data_ptr<int64_t>());
  const int64_t world = all.numel() / kPlaceNumbers, size = places[0].local_size;
  bool alike = size > 0 && world % size == 0;
  for (int64_t rank = 0; rank < world; ++rank) {
    const Place& place = places[rank];
    require(place.wanted == places[0].wanted, "ranks_per_node is ", places[0].wanted, " on rank 0, but ",
            place.wanted, " on rank ", rank, "; set it to the same number everywhere, or nowhere");
    alike = alike && place.local_size == size && place.local_rank == rank % size;
  }
  if (places[0].wanted > 0) return static_cast<int>(places[0].wanted);
  return alike ? static_cast<int>(size) : 0;
}

}  // namespace

BackendChoice choose_backend(Backend wanted, int local_rank, int local_size) {
  std::string reason;
  const bool nccl = has_nccl(&reason);
  if (wanted == Backend::automatic) {
    wanted = nccl && cuda_device_count() > 0 ? Backend::nccl : Backend::gloo;
  }
  if (wanted == Backend::gloo) return {Backend::gloo, at::Device(at::kCPU)};
  require<Unavailable>(nccl, "NCCL was asked for, but ", reason, "; ask for Backend::gloo to train on CPUs");
  const int gpus = cuda_device_count();
  require<Unavailable>(gpus > 0,
                       "NCCL was asked for, but there is no GPU on this machine (or no driver for it); "
                       "ask for Backend::gloo to train on CPUs");
  require(local_size <= gpus, "NCCL needs a GPU for each rank, but this host has ", local_size, " ranks and ",
          gpus, " visible GPUs; start fewer ranks, or show each process all GPUs");
  return {Backend::nccl, at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(local_rank))};
}

Connection connect(const Meeting& meeting, const CommunicatorOptions& options) {
  // What cannot work is refused before anybody waits for this rank.
  BackendChoice choice = choose_backend(options.backend(), meeting.local_rank, meeting.local_size);
  const Rendezvous met = meet(meeting, options);

  Connection connection;
  connection.rank = meeting.rank;
  connection.world_size = meeting.world_size;
  connection.local_rank = meeting.local_rank;
  connection.local_size = meeting.local_size;
  connection.board = met.board;
  connection.joins_processes = meeting.world_size > 1;
  if (meeting.local_size == meeting.world_size && !met.roll->is_one_host()) {
    // The caller, who named an address only, cannot know.
    connection.local_rank = met.roll->local_rank();
    connection.local_size = met.roll->local_size();
    choice = choose_backend(options.backend(), connection.local_rank, connection.local_size);
  }

  GlooSetup gloo;
  gloo.board = met.board;
  gloo.watch = [roll = met.roll] { roll->require_all_alive(); };
  gloo.rank = meeting.rank;
  gloo.world_size = meeting.world_size;
  gloo.address = met.address;
  gloo.timeout = options.timeout();
  gloo.prefix = "control/";
  connection.control = set_up("Gloo", met, [&] { return make_gloo_transport(gloo); });
  connection.ranks_per_node =
      ranks_of_nodes(set_up("Gloo", met, [&] { return places_of_ranks(connection, options); }));
  if (choice.backend == Backend::gloo) {
    gloo.prefix = "data/";
    connection.data = set_up("Gloo", met, [&] { return make_gloo_transport(gloo); });
  } else {
    set_cuda_device(choice.device.index());
    connection.data = set_up("NCCL", met, [&] {
      const RankPlace place{meeting.rank, meeting.world_size, connection.ranks_per_node};
      return make_nccl_transport(connection.control, place, choice.device, options.timeout(),
                                 met.roll->is_one_host(),
                                 [met, rank = meeting.rank, world_size = meeting.world_size] {
                                   return find_trouble(met, rank, world_size);
                                 });
    });
  }
  met.settle();
  return connection;
}

}  // namespace pacer::detail
