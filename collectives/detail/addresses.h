// Network addresses of this host: what a name resolves to, sockets that listen there and nowhere else, and
// the address that others see.
#pragma once

#include <chrono>
#include <string>

namespace pacer::detail {

struct Address {
  std::string text;  // numeric
  bool is_loopback = false;
};

// Throws InvalidArgument where the name is not known.
Address resolve(const std::string& host);
// A listening socket, bound to that address alone. Throws CommunicationError where the address is not this
// host's or the port is taken.
int listen_at(const Address& address, int port);
// True as soon as somebody listens there, false where nobody does in time.
bool wait_for_listener(const Address& address, int port, std::chrono::milliseconds timeout);
// Of the interface through which this host reaches that address. Throws CommunicationError.
std::string local_address_towards(const Address& address);

}  // namespace pacer::detail
