// Collectives of CPU tensors over Gloo, by way of c10d's process group.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <pacer/collectives/detail/gloo_store.h>
#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

struct GlooSetup {
  Gather gather;  // how the ranks tell each other their addresses
  int rank = 0;
  int world_size = 1;
  std::string address;   // of this host, to listen at
  bool one_host = true;  // whether all ranks are on it, so that no link is shared
  std::chrono::milliseconds timeout{};
};

// Returns when all ranks are connected. Throws std::exception.
std::shared_ptr<Transport> make_gloo_transport(const GlooSetup& setup);

}  // namespace pacer::detail
