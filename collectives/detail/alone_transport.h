// The transport of a world with one rank: every collective is a copy on the current stream.
#pragma once

#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

Connection connect_alone(at::Device device);

}  // namespace pacer::detail
