// How ranks meet through a store, and what it costs: requests, of all ranks together, grow with their number
// and not with its square.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <pacer/collectives/communication_error.h>
#include <pacer/collectives/detail/gloo_store.h>
#include <pacer/collectives/detail/in_process_transport.h>
#include <pacer/collectives/detail/rendezvous.h>
#include <pacer/collectives/detail/tcp_store.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/samples.h"

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  REQUIRE(::bind(socket, reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  ::close(socket);
  return ntohs(address.sin_port);
}

detail::RendezvousSettings settings_of_rank(int rank, int world_size) {
  detail::RendezvousSettings settings;
  settings.rank = rank;
  settings.world_size = world_size;
  return settings;
}

// Ranks with a TCP store on the loopback interface, as threads.
class StoreRanks {
 public:
  explicit StoreRanks(int world_size)
      : world_size_(world_size),
        port_(free_port()),
        address_(detail::keep_store(detail::resolve("127.0.0.1"), port_, 60s)),
        stores_(static_cast<size_t>(world_size)),
        rosters_(static_cast<size_t>(world_size)) {}

  void meet(int rank, std::chrono::milliseconds timeout = 60s) {
    const auto number = static_cast<size_t>(rank);
    stores_[number] = std::make_shared<detail::TcpStore>(address_, port_, "test/", timeout);
    rosters_[number] = detail::exchange_members(stores_[number], settings_of_rank(rank, world_size_),
                                                "a port", timeout, std::nullopt);
  }

  detail::RankHealth& rank_health(int rank) { return *rosters_.at(static_cast<size_t>(rank)); }
  int64_t requests(int rank) const { return stores_.at(static_cast<size_t>(rank))->requests(); }
  // Of all ranks together.
  int64_t requests() const {
    int64_t sum = 0;
    for (int rank = 0; rank < world_size_; ++rank) sum += requests(rank);
    return sum;
  }

 private:
  const int world_size_, port_;
  const detail::Address address_;
  std::vector<std::shared_ptr<detail::TcpStore>> stores_;
  std::vector<std::shared_ptr<detail::RankHealth>> rosters_;
};

}  // namespace

TEST_CASE("the requests of a rank do not grow with the number of ranks", "[collectives][rendezvous]") {
  for (const int world_size : {2, 4, 16, 64, 256}) {
    if (world_size > 64 && !wants_long_tests()) continue;
    CAPTURE(world_size);
    const std::vector<int> all = detail::all_ranks(world_size);
    StoreRanks ranks(world_size);
    const auto start = Clock::now();
    const std::vector<std::string> errors = run_ranks(world_size, [&](int rank) { ranks.meet(rank); });
    REQUIRE(first_of(errors).empty());
    const double seconds = seconds_since(start);
    const int64_t met = ranks.requests();

    std::atomic<int> troubles{0}, suspects{0};
    REQUIRE(first_of(run_ranks(world_size, [&](int rank) {
              troubles += ranks.rank_health(rank).find_trouble(all).has_value();
            })) == "");
    const int64_t looked = ranks.requests() - met;
    const auto failure = Clock::now();
    REQUIRE(first_of(run_ranks(world_size, [&](int rank) {
              suspects += static_cast<int>(ranks.rank_health(rank).find_suspects(all).ranks.size());
            })) == "");
    const double failure_seconds = seconds_since(failure);
    const int64_t failed = ranks.requests() - met - looked;
    std::printf(
        "%d ranks: met after %.2f s with %.1f requests a rank; no trouble: %.1f; a failure of all: "
        "%.1f, %.2f s\n",
        world_size, seconds, static_cast<double>(met) / world_size, static_cast<double>(looked) / world_size,
        static_cast<double>(failed) / world_size, failure_seconds);

    CHECK(troubles == 0);
    // Who had no turn for a second is rightly suspected, on a machine with more to do than this.
    if (failure_seconds < 1) CHECK(suspects == 0);
    // One for the connection, two for a record and one to read the others', two to wait for all records and
    // one to read it; one more in each second of waiting. Rank 0 looks at most each 2 ms, and ever more
    // rarely, down to 10 times a second.
    CHECK(met <= world_size * (7 + static_cast<int64_t>(seconds)) + 60 + static_cast<int64_t>(10 * seconds));
    CHECK(looked == world_size);
    // Two for the sign of life, and two for having searched. One look at once, then one after 5, 10, 20,
    // 40 ms and each 80 ms: for a second at most, and another one while somebody else searches.
    CHECK(failed <= world_size * 34);
  }
}

TEST_CASE("waiting for a late rank costs few requests", "[collectives][rendezvous]") {
  StoreRanks ranks(4);
  const std::vector<std::string> errors = run_ranks(4, [&](int rank) {
    if (rank == 3) std::this_thread::sleep_for(3s);
    ranks.meet(rank);
  });
  CHECK(first_of(errors).empty());
  for (int rank = 1; rank < 3; ++rank) CHECK(ranks.requests(rank) <= 7 + 4);
  CHECK(ranks.requests(0) <= 60 + 10 * 4);
}

TEST_CASE("each address of a host is tried, to listen and to connect", "[collectives][rendezvous]") {
  const int port = free_port();
  const detail::Address elsewhere{"192.0.2.1", false}, nobody{"127.0.0.2", true}, here{"127.0.0.1", true};
  CHECK_FALSE(detail::wait_for_listener({nobody, here}, port, 0ms));
  CHECK(detail::keep_store({elsewhere, here}, port, 10s).text == here.text);
  CHECK(detail::keep_store({elsewhere, here}, port, 10s).text == here.text);  // the same store
  const auto found = detail::wait_for_listener({nobody, here}, port, 10s);
  REQUIRE(found);
  CHECK(found->text == here.text);
  CHECK_THROWS_WITH(detail::keep_store({elsewhere}, port, 10s),
                    Catch::Matchers::ContainsSubstring("rank 0 must run on the host of that address"));
}

TEST_CASE("a store that nobody keeps is an error", "[collectives][rendezvous]") {
  const detail::Address here{"127.0.0.1", true};
  const int port = free_port();
  const CapturedStderr quiet;  // LibTorch says much about it
  CHECK_THROWS(detail::TcpStore(here, port, "test/", 300ms));
}

TEST_CASE("this host's address on the way to another is found, also where standard input is closed",
          "[collectives][rendezvous]") {
  const detail::Address here{"127.0.0.1", true};
  CHECK(detail::local_address_towards(here) == here.text);
  const int input = ::dup(STDIN_FILENO);
  ::close(STDIN_FILENO);  // its number is the next descriptor's
  const std::string own = detail::local_address_towards(here);
  if (input >= 0) {
    ::dup2(input, STDIN_FILENO);
    ::close(input);
  }
  CHECK(own == here.text);
}

TEST_CASE("what one rank finds wrong while they meet, all throw", "[collectives][rendezvous]") {
  const int finder = GENERATE(0, 2);
  const auto store = std::make_shared<detail::MemoryStore>();
  const auto start = Clock::now();
  const std::vector<std::string> errors = run_ranks(3, [&](int rank) {
    const auto check = [&](const detail::StoreAllGather::Texts&) {
      if (rank != finder || seconds_since(start) < 0.2) return;
      throw CommunicationError("nobody else can see Zoë", "rendezvous", 0, -1, {3});
    };
    try {
      detail::StoreAllGather{store, "key", rank, 4, "here", 20s, check}.run("text");  // rank 3 never comes
    } catch (const CommunicationError& error) {
      if (error.suspected_ranks() == std::vector<int>{3}) throw;
      throw std::runtime_error("another rank is suspected");
    }
  });
  for (const std::string& error : errors) CHECK(error == "nobody else can see Zoë");
  CHECK(seconds_since(start) < 5);
}

TEST_CASE("ranks that count differently are told so", "[collectives][rendezvous]") {
  const auto store = std::make_shared<detail::MemoryStore>();
  const std::vector<std::string> errors = run_ranks(3, [&](int rank) {
    detail::exchange_members(store, settings_of_rank(rank, rank == 2 ? 5 : 4), "here", 20s, std::nullopt);
  });
  for (const std::string& error : errors) {
    CHECK_THAT(error, Catch::Matchers::Matches("rank . counts (4 ranks, but rank 2 counts 5|5 ranks, but "
                                               "rank . counts 4); start all ranks .*"));
  }
}

TEST_CASE("ranks that do not come are named by all others", "[collectives][rendezvous]") {
  const auto store = std::make_shared<detail::MemoryStore>();
  const std::vector<std::string> errors = run_ranks(3, [&](int rank) {
    detail::exchange_members(store, settings_of_rank(rank, 5), "the place", 300ms, std::nullopt);
  });
  for (const std::string& error : errors) {
    CHECK(
        error ==
        "only 3 of 5 ranks came to the place within 300 ms, without ranks 3 and 4; start them all, or set a "
        "longer timeout");
  }
}

TEST_CASE("texts of any length and content are gathered", "[collectives][rendezvous]") {
  constexpr int kRanks = 5;
  const auto text_of = [](int rank) { return std::string(static_cast<size_t>(rank) * 1000, '\0') + "\n x"; };
  const auto store = std::make_shared<detail::MemoryStore>();
  std::vector<detail::Connection> threads = detail::connect_in_process(kRanks);
  const auto check = [&](const std::vector<std::string>& texts) {
    if (texts.size() != kRanks) throw std::runtime_error("another number of texts");
    for (int rank = 0; rank < kRanks; ++rank) {
      if (texts[static_cast<size_t>(rank)] != text_of(rank)) throw std::runtime_error("another text");
    }
  };
  const std::vector<std::string> errors = run_ranks(kRanks, [&](int rank) {
    check(detail::StoreAllGather{store, "key", rank, kRanks, "here", 10s, [](const auto&) {}}.run(
        text_of(rank)));
    check(detail::gather_over(threads[static_cast<size_t>(rank)].control, kRanks, 10s)(text_of(rank)));
  });
  CHECK(first_of(errors).empty());
}

TEST_CASE("Gloo's values are gathered once", "[collectives][rendezvous]") {
  int gatherings = 0;
  const auto value = [](const std::string& text) { return std::vector<uint8_t>(text.begin(), text.end()); };
  const auto store = c10::make_intrusive<detail::GlooStore>([&](const std::string& own) {
    ++gatherings;
    return std::vector<std::string>{detail::pack({"0/0", "zero"}), own};
  });
  store->set("0/1", value("one"));
  store->set("1/1", value("another"));
  store->wait({"0/0", "0/1", "1/1"});
  CHECK(store->get("0/0") == value("zero"));
  CHECK(store->get("0/1") == value("one"));
  CHECK(store->get("1/1") == value("another"));
  CHECK_FALSE(store->check({"0/2"}));
  CHECK_THROWS_AS(store->get("0/2"), Error);
  CHECK_THROWS_WITH(store->set("0/3", value("late")),
                    Catch::Matchers::ContainsSubstring("Gloo sets 0/3 after"));
  CHECK(gatherings == 1);
}

}  // namespace pacer::testing
