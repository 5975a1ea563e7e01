// Threads of one process as ranks: whoever comes last to an operation does it for all. For tests and demos;
// host memory only.
#pragma once

#include <memory>
#include <vector>

#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

// How sums add: in rank order, or each rank's chunk of a tensor from that rank on, as a ring of real machines
// does, so that tests see who relies on the first.
enum class SumOrder { ranks, ring };

// Connections of `world_size` ranks with each other, on nodes of so many each, which divides
// `world_size`; 0: all on one.
std::vector<Connection> connect_in_process(int world_size, int ranks_per_node = 0,
                                           SumOrder order = SumOrder::ranks);

}  // namespace pacer::detail
