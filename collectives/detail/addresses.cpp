#include <pacer/collectives/detail/addresses.h>

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include <pacer/collectives/detail/process_identity.h>
#include <pacer/core/error.h>
#include <pacer/files/file_descriptor.h>

namespace pacer::detail {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList look_up(const std::string& host, int port, int flags) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  require(error == 0, "the address ", host, " cannot be used: ", ::gai_strerror(error),
          "; set MASTER_ADDR (or the address passed) to the host of rank 0");
  return {found, &::freeaddrinfo};
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* ip = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(ip->sin_addr.s_addr) >> 24) == 127;
  }
  const auto* ip = reinterpret_cast<const sockaddr_in6*>(address);
  return IN6_IS_ADDR_LOOPBACK(&ip->sin6_addr) != 0;
}

std::string text_of(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST] = {};
  const int error = ::getnameinfo(address, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  require<Error>(error == 0, "an address cannot be written: ", ::gai_strerror(error));
  return text;
}

// Connects a socket that does not block, and returns 0 or the error; gives up after a second.
int connect_error(int socket, const addrinfo& to) {
  if (::connect(socket, to.ai_addr, to.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  constexpr int kPatienceMs = 1000;
  pollfd watched = {socket, POLLOUT, 0};
  if (::poll(&watched, 1, kPatienceMs) != 1) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof(error);
  return ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

// TCP connects a socket to itself where nobody listens and the kernel happens to give it that very port:
// sooner or later, if one keeps trying a port of the range for those who connect.
bool is_joined_to_itself(int socket) {
  sockaddr_storage own = {}, peer = {};
  socklen_t own_size = sizeof(own), peer_size = sizeof(peer);
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
         own_size == peer_size && std::memcmp(&own, &peer, own_size) == 0;
}

bool somebody_answers(const addrinfo& at) {
  const int socket = ::socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket < 0) return false;
  // A socket that was joined to itself must not keep rank 0 from the port.
  const int yes = 1;
  ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  const bool answers = connect_error(socket, at) == 0 && !is_joined_to_itself(socket);
  ::close(socket);
  return answers;
}

}  // namespace

std::vector<Address> resolve(const std::string& host) {
  const AddressList found = look_up(host, 0, 0);
  std::vector<Address> addresses;
  for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
    Address address{text_of(each->ai_addr, each->ai_addrlen), is_loopback(each->ai_addr)};
    const bool is_new = std::none_of(addresses.begin(), addresses.end(),
                                     [&](const Address& other) { return other.text == address.text; });
    if (is_new) addresses.push_back(std::move(address));
  }
  return addresses;
}

std::optional<int> listen_at(const Address& address, int port) {
  const AddressList found = look_up(address.text, port, AI_NUMERICHOST | AI_NUMERICSERV);
  const int socket = above_standard_streams(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  if (socket >= 0 && ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) == 0 &&
      ::bind(socket, found->ai_addr, found->ai_addrlen) == 0 && ::listen(socket, SOMAXCONN) == 0) {
    return socket;
  }
  const int error = errno;
  if (socket >= 0) ::close(socket);
  if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) return std::nullopt;
  fail_rendezvous(concatenate("rank 0 cannot listen at ", address.text, " port ", port, ": ",
                              std::strerror(error),
                              error == EADDRINUSE ? "; choose another port" : "; choose another address"));
}

std::optional<Address> wait_for_listener(const std::vector<Address>& addresses, int port,
                                         std::chrono::milliseconds timeout,
                                         const std::function<void()>& look) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (true) {
    for (const Address& address : addresses) {
      const AddressList at = look_up(address.text, port, AI_NUMERICHOST | AI_NUMERICSERV);
      if (somebody_answers(*at)) return address;
    }
    if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
    if (look) look();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

namespace {

// What becomes of a greeting.
enum class Answer { nobody, none, hang_up, of_store, of_other };

Answer greet(const Address& address, int port, std::chrono::milliseconds timeout) {
  // As the store's client begins: "validate" and a magic number, "ping" and a number, which comes back.
  constexpr std::array<uint8_t, 10> kGreeting = {0, 0xCE, 0xF7, 0x85, 0x3C, 13, 'p', 'a', 'c', 'e'};
  constexpr size_t kEcho = 4;
  const AddressList at = look_up(address.text, port, AI_NUMERICHOST | AI_NUMERICSERV);
  const int socket = ::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket < 0) return Answer::none;
  const int error = connect_error(socket, *at);
  // A reset connection is one that somebody had listened for.
  if ((error != 0 && error != ECONNRESET) || is_joined_to_itself(socket)) {
    ::close(socket);
    return Answer::nobody;
  }
  std::array<uint8_t, kEcho> echo = {};
  size_t received = 0;
  bool has_hung_up = error != 0 || ::send(socket, kGreeting.data(), kGreeting.size(), MSG_NOSIGNAL) < 0;
  if (!has_hung_up) {
    const auto deadline =
        std::chrono::steady_clock::now() + std::min(timeout, std::chrono::milliseconds(1000));
    while (received < kEcho && !has_hung_up) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      pollfd watched = {socket, POLLIN, 0};
      if (left.count() <= 0 || ::poll(&watched, 1, static_cast<int>(left.count())) <= 0) break;
      const ssize_t count = ::recv(socket, echo.data() + received, kEcho - received, 0);
      if (count > 0) received += static_cast<size_t>(count);
      has_hung_up = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
    }
  }
  ::close(socket);
  if (has_hung_up) return Answer::hang_up;
  if (received < kEcho) return Answer::none;
  return std::equal(echo.begin(), echo.end(), kGreeting.end() - kEcho) ? Answer::of_store : Answer::of_other;
}

}  // namespace

bool is_other_service(const Address& address, int port, std::chrono::milliseconds timeout) {
  // A process that is about to end hangs up, too: rank 0 of an earlier run at this port.
  constexpr std::chrono::milliseconds kPatience{5000}, kPause{100};
  const auto deadline = std::chrono::steady_clock::now() + std::min(timeout, kPatience);
  while (true) {
    const Answer answer = greet(address, port, timeout);
    if (answer != Answer::hang_up) return answer == Answer::of_other;
    if (std::chrono::steady_clock::now() >= deadline) return true;
    std::this_thread::sleep_for(kPause);
  }
}

std::string local_address_towards(const Address& address) {
  // Connecting a datagram socket sends nothing; the port does not matter.
  const AddressList found = look_up(address.text, 9, AI_NUMERICHOST | AI_NUMERICSERV);
  const int socket = ::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage own = {};
  socklen_t size = sizeof(own);
  auto* const own_address = reinterpret_cast<sockaddr*>(&own);
  const bool known = socket >= 0 && ::connect(socket, found->ai_addr, found->ai_addrlen) == 0 &&
                     ::getsockname(socket, own_address, &size) == 0;
  const int error = errno;
  if (socket >= 0) ::close(socket);
  if (!known) {
    fail_rendezvous(concatenate("this host has no way to ", address.text, ": ", std::strerror(error),
                                "; set listen_address to the address of this host that the others reach"));
  }
  return text_of(own_address, size);
}

}  // namespace pacer::detail
