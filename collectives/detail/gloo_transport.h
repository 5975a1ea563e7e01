// Collectives of CPU tensors over Gloo, by way of c10d's process group.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

struct GlooSetup {
  std::shared_ptr<NoticeBoard> board;  // where ranks tell each other their addresses
  std::string prefix;                  // of the notices, one for each group
  std::function<void()> watch;         // throws where a rank will not come any more
  int rank = 0;
  int world_size = 1;
  std::string address;  // of this host, to listen at
  std::chrono::milliseconds timeout{};
};

// Returns when all ranks are connected. Throws std::exception.
std::shared_ptr<Transport> make_gloo_transport(const GlooSetup& setup);

}  // namespace pacer::detail
