// Network addresses of this host: what a name resolves to, sockets that listen there and nowhere else, and
// the address that others see.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace pacer::detail {

struct Address {
  std::string text;  // numeric
  bool is_loopback = false;
};

// Returns all addresses of a name, at least one, in the order in which the resolver wants them tried. Throws
// InvalidArgument where the name is not known.
std::vector<Address> resolve(const std::string& host);
// Returns a listening socket, bound to that address alone, or nothing where the address is not one of this
// host. Throws CommunicationError where the port is taken.
std::optional<int> listen_at(const Address& address, int port);
// Returns the first of these addresses where somebody listens, as soon as there is one, or nothing where
// there is none in time. `look` is called now and then meanwhile.
std::optional<Address> wait_for_listener(const std::vector<Address>& addresses, int port,
                                         std::chrono::milliseconds timeout,
                                         const std::function<void()>& look = {});
// Whether what listens there is known not to be a store of LibTorch's: it answers a greeting with something
// else, or hangs up on each one for 5 seconds, or for `timeout` where that is shorter. False where it says
// nothing in time, a second at most, and where nobody listens any more.
bool is_other_service(const Address& address, int port, std::chrono::milliseconds timeout);
// Returns the address of the interface through which this host reaches `address`. Throws CommunicationError.
std::string local_address_towards(const Address& address);

}  // namespace pacer::detail
