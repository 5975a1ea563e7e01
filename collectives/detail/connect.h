// Makes the Connection of a run: the ranks find each other through c10d's stores (rendezvous.h), and then get
// one transport for data and one for small messages. Nothing of c10d shows in this header.
#pragma once

#include <memory>
#include <string>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

// Where and as which rank to meet.
struct RendezvousSettings {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::string file;  // meet through this file, or if empty
  std::string host;  // at this address
  int port = 0;
  bool store_is_hosted = false;  // somebody else (torchrun's agent) listens at host:port
};

// Throws as Communicator::from_environment says.
Connection connect(const RendezvousSettings& settings, const CommunicatorOptions& options);

// The path of the file through which the processes of one launch on this host meet, in a folder of this user
// that nobody else can read; `job` as in LaunchEnvironment. Makes the folder. Throws InvalidArgument.
std::string rendezvous_file(const std::string& job);

// One rank by itself, on the device that the options ask for.
Connection connect_one(const CommunicatorOptions& options);

// NCCL over GPU `device`. `control` carries the id of the group. `trouble`, asked by another thread while an
// operation takes long, says why it cannot end any more, or nothing. Throws std::exception.
std::shared_ptr<Transport> make_nccl_transport(const std::shared_ptr<Transport>& control, int rank,
                                               int world_size, at::Device device,
                                               std::chrono::milliseconds timeout, bool one_host,
                                               std::function<std::optional<std::string>()> trouble);
// False in builds without NCCL; `reason` says what was missing.
bool has_nccl(std::string* reason);

}  // namespace pacer::detail
