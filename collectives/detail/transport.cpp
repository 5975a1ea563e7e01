#include <pacer/collectives/detail/transport.h>

#include <pacer/core/error.h>

namespace pacer::detail {

TransportWorkPtr Transport::run_on_stream(const std::function<void()>& /*f*/) {
  throw Error("the transport " + name() + " has no stream");
}

}  // namespace pacer::detail
