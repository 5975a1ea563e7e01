// What meets at a port where an earlier run's rank 0 is about to end, or where nobody listens.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <pacer/collectives/detail/addresses.h>
#include <pacer/collectives/detail/rendezvous.h>
#include <pacer/collectives/detail/tcp_store.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/message_of.h"

namespace pacer::testing::relaunch {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

const detail::Address kHere{"127.0.0.1", true};

sockaddr_in loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int own_port(int socket) {
  sockaddr_in address = {};
  socklen_t size = sizeof(address);
  REQUIRE(::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  return ntohs(address.sin_port);
}

// Listens on the loopback interface, and resets the connection of each who comes, as a process does that ends
// with connections which it has not taken.
class DyingListener {
 public:
  DyingListener() {
    const int yes = 1;
    ::setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    sockaddr_in address = loopback(0);
    REQUIRE(::bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    REQUIRE(::listen(socket_, 16) == 0);
    thread_ = std::thread([this] {
      while (true) {
        const int client = ::accept(socket_, nullptr, nullptr);
        if (client < 0) return;
        const linger at_once = {1, 0};
        ::setsockopt(client, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
        ::close(client);
        ++resets_;
      }
    });
  }
  ~DyingListener() { end(); }
  void end() {
    if (!thread_.joinable()) return;
    ::shutdown(socket_, SHUT_RDWR);
    thread_.join();
    ::close(socket_);
  }
  int port() const { return own_port(socket_); }
  int resets() const { return resets_; }

 private:
  const int socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::atomic<int> resets_{0};
  std::thread thread_;
};

detail::RendezvousSettings settings_of(int rank, int port) {
  detail::RendezvousSettings settings;
  settings.rank = rank;
  settings.world_size = 2;
  settings.host = kHere.text;
  settings.port = port;
  return settings;
}

CommunicatorOptions options(std::chrono::milliseconds timeout) {
  return CommunicatorOptions().timeout(timeout).listen_address(kHere.text);  // so that they meet at the port
}

}  // namespace

TEST_CASE("a rank waits for the new rank 0 where that of an earlier run hangs up",
          "[collectives][rendezvous]") {
  DyingListener earlier;
  const int port = earlier.port();
  std::string message;
  std::thread rank_1(
      [&] { message = message_of([&] { detail::rendezvous(settings_of(1, port), options(60s)); }); });
  const auto start = Clock::now();
  while (earlier.resets() < 2 && Clock::now() - start < 20s) std::this_thread::sleep_for(5ms);
  earlier.end();
  std::this_thread::sleep_for(200ms);
  std::string of_rank_0;
  {
    const CapturedStderr quiet;  // LibTorch says much where rank 1 does not come
    of_rank_0 = message_of([&] {
      const detail::Address address = detail::keep_store({kHere}, port, 10s);
      const auto store = std::make_shared<detail::TcpStore>(address, port, "pacer//1/", 10s);
      detail::exchange_members(store, settings_of(0, port), "the port", 10s, std::nullopt);
    });
    rank_1.join();
  }
  CHECK(message == "");
  CHECK(of_rank_0 == "");
}

TEST_CASE("what hangs up on and on is another service", "[collectives][rendezvous]") {
  const DyingListener other;
  const auto start = Clock::now();
  CHECK_THAT(message_of([&] { detail::rendezvous(settings_of(1, other.port()), options(1s)); }),
             Catch::Matchers::ContainsSubstring("is not rank 0 but another service"));
  CHECK(Clock::now() - start < 10s);
  CHECK(other.resets() > 3);
}

TEST_CASE("a socket that is joined to itself is no service", "[collectives][rendezvous]") {
  int port = 0;
  {
    // One of those that the kernel gives to who connects: it tries them one after the other.
    const DyingListener listener;
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = loopback(listener.port());
    REQUIRE(::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    port = own_port(socket);
    ::close(socket);
  }
  const auto start = Clock::now();
  bool is_other = false;
  for (int i = 0; i < 60'000 && !is_other && Clock::now() - start < 20s; ++i) {
    is_other = detail::is_other_service(kHere, port, 10s);
  }
  CHECK_FALSE(is_other);
}

}  // namespace pacer::testing::relaunch
