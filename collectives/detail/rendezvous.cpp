#include <pacer/collectives/detail/rendezvous.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include <pacer/collectives/communication_error.h>
#include <pacer/collectives/detail/addresses.h>
#include <pacer/collectives/detail/file_board.h>
#include <pacer/collectives/detail/store_board.h>
#include <pacer/collectives/detail/watched_board.h>
#include <pacer/collectives/launch_environment.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr const char* kLoopback = "127.0.0.1";
// Of one question to the store, once all ranks are joined.
constexpr std::chrono::milliseconds kCallLimit{1000};
// How long rank 0 stays after a failed meeting: its process may end next, and its store with it.
constexpr std::chrono::milliseconds kFarewell{500};

Rendezvous meet_through_file(const Meeting& meeting, const CommunicatorOptions& options) {
  const auto board = std::make_shared<FileBoard>(meeting.file);
  const auto roll = std::make_shared<RollCall>(board, meeting.rank, meeting.world_size, meeting.file);
  const auto deadline = RollCall::Clock::now() + options.timeout();
  try {
    roll->wait_for_all(options.timeout());
  } catch (const CommunicationError&) {
    // It would stop the next run. But who comes late to a run that failed early shall read there that it did.
    if (RollCall::Clock::now() >= deadline || roll->has_everybody_come()) board->remove_name();
    throw;
  }
  // Everybody has the file open.
  if (meeting.rank == 0) board->remove_name();
  require(roll->is_one_host(), "ranks on several hosts cannot meet through the file ", meeting.file,
          "; let them meet at an address");
  const auto watched = std::make_shared<WatchedBoard>(board, roll, meeting.rank, std::nullopt);
  return {watched, roll, meeting.file, kLoopback, [] {}};
}

// Boards of one store that come after each other have different notices. All ranks count alike, as they meet
// in the same order.
std::string prefix_of(const Meeting& meeting) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, int> meetings;
  const std::lock_guard<std::mutex> lock(mutex);
  const int number = ++meetings[{meeting.host, meeting.port}];
  // The agent's store is older than this attempt of the launch.
  const std::string job = meeting.store_is_hosted ? read_launch_environment().job : "";
  return concatenate("pacer/", job, '/', number, '/');
}

// Where rank 0 listens.
Address listener_of(const Meeting& meeting, const CommunicatorOptions& options, const Address& host) {
  const bool may_be_many = meeting.local_size < meeting.world_size;
  if (!options.listen_address().empty() && !host.is_loopback) return resolve(options.listen_address());
  require(!may_be_many || !host.is_loopback, meeting.host, " is ", host.text,
          " for rank 0, which other hosts cannot reach; set MASTER_ADDR to an address that they can");
  return host;
}

// Where ranks of other hosts can reach this one.
std::string address_for_others(const CommunicatorOptions& options, const Address& host) {
  if (!options.listen_address().empty()) return resolve(options.listen_address()).text;
  const std::string address = local_address_towards(host);
  require(!resolve(address).is_loopback, "this host reaches rank 0 at ", address,
          ", where other hosts cannot reach it; set listen_address to an address that they can");
  return address;
}

// Talks to a store over the network, which may go away at any time: what LibTorch says then is many lines.
template <class F>
auto ask_store(const std::string& place, const F& f) {
  try {
    return f();
  } catch (const CommunicationError&) {
    throw;
  } catch (const InvalidArgument&) {
    throw;
  } catch (const std::exception& error) {
    const std::string words = error.what();
    throw CommunicationError(concatenate("the store at ", place, " went away while the ranks met (",
                                         words.substr(0, words.find('\n')), "); see what rank 0 printed"),
                             "rendezvous", 0, -1, {0});
  }
}

Rendezvous meet_at_address(const Meeting& meeting, const CommunicatorOptions& options) {
  const std::string place = concatenate(meeting.host, " port ", meeting.port);
  const std::string& listen = options.listen_address();
  require(listen != "0.0.0.0" && listen != "::",
          "listen_address is every address of this host; set it to the one that the other ranks reach");
  const Address host = resolve(meeting.host);
  const bool hosts = meeting.rank == 0 && !meeting.store_is_hosted;
  const Address meeting_point = hosts ? listener_of(meeting, options, host) : host;
  // LibTorch would look for it as well, but talks a lot where it does not find it.
  if (!hosts && !wait_for_listener(host, meeting.port, options.timeout())) {
    throw CommunicationError(concatenate("nobody answers rank ", meeting.rank, " at ", place, " within ",
                                         options.timeout().count(), " ms; start ",
                                         meeting.store_is_hosted ? "the launcher's agent" : "rank 0",
                                         " there, or set a longer timeout"),
                             "rendezvous", 0, -1,
                             meeting.store_is_hosted ? std::vector<int>() : std::vector<int>{0});
  }
  const auto board = ask_store(place, [&] {
    return std::make_shared<StoreBoard>(meeting_point, meeting.port, hosts, prefix_of(meeting),
                                        options.timeout());
  });
  const auto roll = std::make_shared<RollCall>(board, meeting.rank, meeting.world_size, place);
  try {
    ask_store(place, [&] { roll->wait_for_all(options.timeout()); });
  } catch (const CommunicationError&) {
    // The store goes with this process: first, the others read there what went wrong.
    if (hosts) std::this_thread::sleep_for(kFarewell);
    throw;
  }

  const std::optional<int> keeper = meeting.store_is_hosted ? std::nullopt : std::optional<int>(0);
  const auto watched = std::make_shared<WatchedBoard>(board, roll, meeting.rank, keeper);
  const Rendezvous met{watched, roll, place,
                       roll->is_one_host() ? kLoopback : address_for_others(options, host),
                       [board] { board->limit_calls(kCallLimit); }};
  if (meeting.rank == 0 && (!roll->is_one_host() || (hosts && !meeting_point.is_loopback))) {
    std::fprintf(stderr,
                 "pacer: rank 0 listens at %s, beyond this host, and connections there are neither encrypted "
                 "nor authenticated; use a private network\n",
                 hosts ? meeting_point.text.c_str() : met.address.c_str());
  }
  return met;
}

}  // namespace

Rendezvous meet(const Meeting& meeting, const CommunicatorOptions& options) {
  if (meeting.file.empty()) return meet_at_address(meeting, options);
  return meet_through_file(meeting, options);
}

}  // namespace pacer::detail
