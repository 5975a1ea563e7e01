// What meets ranks that come late, not at all, or in another attempt of their launch; and a port of somebody
// else.
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/addresses.h>
#include <pacer/collectives/detail/launch_attempt.h>
#include <pacer/collectives/detail/rendezvous.h>
#include <pacer/collectives/detail/tcp_store.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/message_of.h"

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// A socket that listens on the loopback interface, and what it does with each who connects.
class Listener {
 public:
  Listener() {
    socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    REQUIRE(::bind(socket_, reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    REQUIRE(::listen(socket_, 16) == 0);
    port_ = ntohs(address.sin_port);
  }
  ~Listener() {
    ::shutdown(socket_, SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
    ::close(socket_);
  }
  // Says `first`, waits for words where it is told to, says `then`, and hangs up.
  void serve(const std::string& first, bool waits, const std::string& then) {
    thread_ = std::thread([this, first, waits, then] {
      while (true) {
        const int client = ::accept(socket_, nullptr, nullptr);
        if (client < 0) return;
        (void)::send(client, first.data(), first.size(), MSG_NOSIGNAL);
        std::array<char, 64> words = {};
        if (waits) (void)::recv(client, words.data(), words.size(), 0);
        (void)::send(client, then.data(), then.size(), MSG_NOSIGNAL);
        ::close(client);
      }
    });
  }
  int port() const { return port_; }

 private:
  int socket_ = -1, port_ = 0;
  std::thread thread_;
};

const detail::Address kHere{"127.0.0.1", true};

detail::RendezvousSettings settings_of(int rank, int world_size) {
  detail::RendezvousSettings settings;
  settings.rank = rank;
  settings.world_size = world_size;
  return settings;
}

}  // namespace

TEST_CASE("another service at the port of rank 0 is told from a store", "[collectives][rendezvous]") {
  {
    Listener silent;
    CHECK_FALSE(detail::is_other_service(kHere, silent.port(), 200ms));
  }
  Listener mail, web, closed;
  mail.serve("220 mail.example.org ESMTP\r\n", true, "");
  web.serve("", true, "HTTP/1.1 400 Bad Request\r\n\r\n");
  closed.serve("", false, "");
  for (const Listener* other : {&mail, &web, &closed}) {
    CHECK(detail::is_other_service(kHere, other->port(), 10s));
  }
  // Another program may take a port that was free, so that several are tried.
  int port = 0;
  std::string kept;
  for (int attempt = 0; attempt < 20 && kept.empty(); ++attempt) {
    port = Listener().port();
    (void)message_of([&] { kept = detail::keep_store({kHere}, port, 10s).text; });
  }
  CHECK(kept == kHere.text);
  CHECK_FALSE(detail::is_other_service(kHere, port, 10s));
}

TEST_CASE("ranks that meet another service say so at once, without a back trace",
          "[collectives][rendezvous]") {
  Listener web;
  web.serve("", true, "HTTP/1.1 400 Bad Request\r\n\r\n");
  detail::RendezvousSettings settings = settings_of(1, 2);
  settings.host = "127.0.0.1";
  settings.port = web.port();
  settings.store_is_hosted = true;
  const CapturedStderr output;
  const auto start = Clock::now();
  constexpr auto kTimeout = 60s;
  CHECK_THROWS_WITH(detail::rendezvous(settings, CommunicatorOptions().timeout(kTimeout)),
                    Catch::Matchers::ContainsSubstring("is not the launcher's agent but another service; set "
                                                       "MASTER_PORT to a free port"));
  CHECK(Clock::now() - start < kTimeout / 2);
  CHECK(output.text() == "");
}

TEST_CASE("who waits long says for whom, once", "[collectives][rendezvous]") {
  const auto store = std::make_shared<detail::MemoryStore>();
  std::string said;
  {
    const CapturedStderr output;
    (void)run_ranks(3, [&](int rank) {
      if (rank == 0) store->wait_for("here", 10s);  // until rank 2 has come, whom it else waits for, too
      if (rank != 1) detail::exchange_members(store, settings_of(rank, 3), "the place", 2s, std::nullopt);
    });
    said = output.text();
  }
  CHECK(said ==
        "pacer: rank 0 has waited 0.1 s at the place for rank 1, and will for 2 s in all; start them all, or "
        "see what they printed\n");
  // Its port is nobody else's, and stays unused: ranks of one host meet through a file.
  const Listener listener;
  {
    const CapturedStderr output;
    CHECK_THROWS(
        Communicator::from_address("127.0.0.1", listener.port(), 1, 2, CommunicatorOptions().timeout(1s)));
    said = output.text();
  }
  CHECK(said.find("rank 1 has waited 0.05 s at 127.0.0.1 port ") != std::string::npos);
  CHECK(said.find(
            "for rank 0, and will for 1 s in all; start it on this host, with the same MASTER_PORT and the "
            "same XDG_RUNTIME_DIR or TMPDIR, because these ranks meet through the file /") !=
        std::string::npos);
}

TEST_CASE("attempts of a launch share a store and do not see each other", "[collectives][rendezvous]") {
  const auto store = std::make_shared<detail::MemoryStore>();
  const auto meet = [&](int rank, int world_size, Clock::duration late) {
    std::this_thread::sleep_for(late);
    const detail::LaunchAttempt attempt = detail::enter_attempt(store, rank, "the store", 20s);
    detail::exchange_members(attempt.store, settings_of(rank, world_size), "the store", 20s, std::nullopt,
                             attempt.answer);
    attempt.store->append("rank", std::to_string(rank));
    return attempt.store;
  };
  // Some of an attempt ask and end; in the next one rank 0 comes first or last, and there are more ranks.
  CHECK_THROWS_WITH(
      detail::enter_attempt(store, 1, "the store", 200ms),
      "rank 0 did not come to the store within 200 ms; see what it printed, or set a longer timeout");
  for (const int first : {0, 1, 0}) {
    const int world_size = first == 1 ? 4 : 3;
    std::vector<std::shared_ptr<detail::Store>> of_ranks(4);
    REQUIRE(first_of(run_ranks(world_size, [&](int rank) {
              of_ranks[static_cast<size_t>(rank)] = meet(rank, world_size, rank == first ? 0ms : 100ms);
            })) == "");
    CHECK(of_ranks[0]->read("rank").size() == static_cast<size_t>(world_size));
    CHECK(of_ranks[1]->read("rank").size() == static_cast<size_t>(world_size));
  }
}

}  // namespace pacer::testing
