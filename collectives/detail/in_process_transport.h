// Threads of one process as ranks: whoever comes last to an operation does it for all, summing in rank order.
// For tests and demos; host memory only.
#pragma once

#include <memory>
#include <vector>

#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

// Connections of `world_size` ranks with each other, on nodes of so many each, which divides
// `world_size`; 0: all on one.
std::vector<Connection> connect_in_process(int world_size, int ranks_per_node = 0);

}  // namespace pacer::detail
