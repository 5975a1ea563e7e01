#include <pacer/collectives/detail/rendezvous.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include <pacer/collectives/communication_error.h>
#include <pacer/collectives/detail/addresses.h>
#include <pacer/collectives/detail/file_store.h>
#include <pacer/collectives/detail/launch_attempt.h>
#include <pacer/collectives/detail/tcp_store.h>
#include <pacer/collectives/detail/wait_notice.h>
#include <pacer/collectives/launch_environment.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr const char* kLoopback = "127.0.0.1";
// Of one question to the store, once all ranks are joined.
constexpr Milliseconds kCallLimit{1000};
// How long rank 0 stays after a failed meeting, so that the others read there what went wrong: its process
// may end next, and its store with it.
constexpr Milliseconds kFarewell{500};
// How often who waits looks whether a process has ended.
constexpr Milliseconds kLook{250};
const std::string kHere = "here";  // the key of who the ranks are

bool has_everybody_come(Store& store, int world_size) {
  std::set<std::string> ranks;
  for (const std::string& bytes : store.read(kHere)) {
    const std::vector<std::string> record = unpack(bytes);
    if (record.size() >= 2 && record[0] == "rank") ranks.insert(record[1]);
  }
  return static_cast<int>(ranks.size()) >= world_size;
}

}  // namespace

std::shared_ptr<Roster> call_roll(const std::shared_ptr<Store>& store, const Meeting& meeting,
                                  const std::string& place, Milliseconds timeout, std::optional<int> keeper,
                                  const std::function<void()>& look) {
  const Member own = Member::myself(meeting.world_size);
  const std::string own_text = own.to_text();
  const auto rank = static_cast<size_t>(meeting.rank);
  std::vector<std::optional<Member>> members(static_cast<size_t>(meeting.world_size));
  auto next_look = Clock::now() + kLook;
  const auto read_members = [&](const Exchange::Texts& texts) {
    if (look) look();
    require(texts[rank] == own_text, "rank ", rank, " of ", members.size(), " is at ", place,
            " already: two processes have the same rank, or something is left from an earlier run; start "
            "each rank once, and choose another place to meet");
    for (size_t other = 0; other < texts.size(); ++other) {
      if (!texts[other] || members[other]) continue;
      const std::optional<Member> member = Member::parse(*texts[other]);
      if (!member || member->world_size != own.world_size) {
        fail_rendezvous(
            concatenate("rank ", rank, " counts ", own.world_size, " ranks, but rank ", other, " counts ",
                        member ? std::to_string(member->world_size) : "in another way",
                        "; start all ranks of a run with the same world size and version of pacer"),
            {static_cast<int>(other)});
      }
      members[other] = member;
    }
    if (Clock::now() < next_look) return;
    require_alive(members, own, place);
    next_look = Clock::now() + kLook;
  };
  const Exchange exchange{store, kHere, meeting.rank, meeting.world_size, place, timeout, read_members};
  const std::vector<std::string> texts = exchange.run(own_text);
  read_members({texts.begin(), texts.end()});
  return std::make_shared<Roster>(store, meeting.rank, std::move(members), keeper, place);
}

namespace {

Gather gather_through(const std::shared_ptr<Store>& store, const Meeting& meeting, const std::string& place,
                      Milliseconds timeout, const std::shared_ptr<Roster>& roster) {
  const Exchange exchange{
      store, "control", meeting.rank, meeting.world_size, place, timeout, [roster](const Exchange::Texts&) {
        roster->require_all_alive();
      }};
  return [exchange](const std::string& own) { return exchange.run(own); };
}

Rendezvous meet_through_file(const std::shared_ptr<FileStore>& store, const Meeting& meeting,
                             const std::string& place, Milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::shared_ptr<Roster> roster;
  try {
    roster = call_roll(store, meeting, place, timeout, std::nullopt);
  } catch (const CommunicationError&) {
    // The file would stop the next run. But who comes late to a run that failed early shall read there that
    // it did.
    if (Clock::now() >= deadline || has_everybody_come(*store, meeting.world_size)) store->remove_name();
    throw;
  }
  // Everybody has the file open.
  if (meeting.rank == 0) store->remove_name();
  require(roster->is_one_host(), "ranks on several hosts cannot meet through the file ", place,
          "; let them meet at an address");
  return {roster, place, kLoopback, gather_through(store, meeting, place, timeout, roster), [] {}};
}

// Which meeting of this process at this place it is. All ranks count alike, as they meet in the same order.
int number_of_meeting(const std::string& place) {
  static std::mutex mutex;
  static std::map<std::string, int> meetings;
  const std::lock_guard<std::mutex> lock(mutex);
  return ++meetings[place];
}

[[noreturn]] void fail_alone(const Meeting& meeting, const std::string& place, Milliseconds timeout) {
  fail_rendezvous(
      concatenate("nobody answers rank ", meeting.rank, " at ", place, " within ", timeout.count(),
                  " ms; start ", meeting.store_is_hosted ? "the launcher's agent" : "rank 0",
                  " there, or set a longer timeout"),
      meeting.store_is_hosted ? std::vector<int>() : std::vector<int>{0});
}

WaitNotice notice_of(const Meeting& meeting, const std::string& place, Milliseconds timeout) {
  return {meeting.rank, place, timeout, /*speaks=*/meeting.rank == 1 || meeting.local_rank == 0};
}

// A loopback address is of this host alone, and other users of the host can reach it. So the ranks meet
// through a file instead, which stands for the port of this loopback interface.
Rendezvous meet_at_loopback(const Meeting& meeting, const std::string& place, Milliseconds timeout) {
  std::string name = Member::myself(1).network;
  std::replace(name.begin(), name.end(), '/', '-');
  const std::string port = std::to_string(meeting.port);
  const std::string path = concatenate(private_folder_of_user(), "/port-", port, '-', name, '-',
                                       number_of_meeting("loopback " + port));
  if (meeting.rank == 0) {
    const auto store = FileStore::keep(path);
    if (!store) {
      fail_rendezvous(concatenate("rank 0 cannot keep ", path, ": another rank 0 waits at ", place,
                                  "; choose another port"),
                      {});
    }
    try {
      return meet_through_file(store, meeting, place, timeout);
    } catch (const CommunicationError&) {
      std::this_thread::sleep_for(kFarewell);
      store->remove_name();
      throw;
    }
  }
  const auto deadline = Clock::now() + timeout;
  WaitNotice notice = notice_of(meeting, place, timeout);
  while (true) {
    if (const auto store = FileStore::open_kept(path)) {
      return meet_through_file(store, meeting, place, timeout);
    }
    if (Clock::now() >= deadline) fail_alone(meeting, place, timeout);
    notice.look("rank 0", concatenate("start it on this host, with the same MASTER_PORT and the same "
                                      "XDG_RUNTIME_DIR or TMPDIR, because these ranks meet through the file ",
                                      path));
    std::this_thread::sleep_for(Milliseconds(20));
  }
}

// Where ranks of other hosts can reach this one. `store`: where the store is.
std::string address_for_others(const CommunicatorOptions& options, const Address& store) {
  if (!options.listen_address().empty()) return resolve(options.listen_address()).front().text;
  const std::string address = local_address_towards(store);
  require(!resolve(address).front().is_loopback, "this host reaches rank 0 at ", address,
          ", where other hosts cannot reach it; set listen_address to an address that they can");
  return address;
}

// Talks to a store over the network, which may go away at any time: what LibTorch says then is many lines.
template <class F>
auto ask_store(const std::string& place, const F& f) {
  try {
    return f();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string words = error.what();
    fail_rendezvous(concatenate("the store at ", place, " went away while the ranks met (",
                                words.substr(0, words.find('\n')), "); see what rank 0 printed"),
                    {0});
  }
}

// LibTorch's client would look for it as well, but talks a lot where it does not find it, or finds something
// else.
Address find_store(const std::vector<Address>& addresses, const Meeting& meeting, const std::string& place,
                   Milliseconds timeout) {
  WaitNotice notice = notice_of(meeting, place, timeout);
  const std::string whom = meeting.store_is_hosted ? "the launcher's agent" : "rank 0";
  const auto deadline = Clock::now() + timeout;
  while (true) {
    const auto left =
        std::max(std::chrono::duration_cast<Milliseconds>(deadline - Clock::now()), Milliseconds(0));
    const auto point = wait_for_listener(addresses, meeting.port, left, [&] {
      notice.look(whom, concatenate("start ", whom, " there, or correct MASTER_ADDR and MASTER_PORT"));
    });
    if (!point) fail_alone(meeting, place, timeout);
    if (is_other_service(*point, meeting.port, timeout)) {
      fail_rendezvous(
          concatenate("what listens at ", place, " is not ", whom,
                      " but another service; set MASTER_PORT to a free port, alike on all ranks"));
    }
    // Rank 0 of an earlier run may have ended meanwhile.
    if (wait_for_listener({*point}, meeting.port, Milliseconds(0))) return *point;
  }
}

Rendezvous meet_at_address(const Meeting& meeting, const CommunicatorOptions& options) {
  const std::string place = concatenate(meeting.host, " port ", meeting.port);
  const std::string& listen = options.listen_address();
  require(listen != "0.0.0.0" && listen != "::",
          "listen_address is every address of this host; set it to the one that the other ranks reach");
  std::vector<Address> addresses = resolve(meeting.host);
  const bool is_loopback = std::all_of(addresses.begin(), addresses.end(),
                                       [](const Address& address) { return address.is_loopback; });
  if (is_loopback && listen.empty() && !meeting.store_is_hosted) {
    require(
        meeting.local_size == meeting.world_size, meeting.host, " is ", addresses.front().text, " for rank ",
        meeting.rank,
        ", which other hosts cannot reach; set MASTER_ADDR to an address that they can, or listen_address");
    return meet_at_loopback(meeting, place, options.timeout());
  }

  const bool keeps = meeting.rank == 0 && !meeting.store_is_hosted;
  if (!listen.empty() && !meeting.store_is_hosted && (keeps || is_loopback)) {
    // The name of a host is often a loopback address there; its ranks then find rank 0 where it listens.
    std::vector<Address> others = resolve(listen);
    if (!keeps) others.insert(others.end(), addresses.begin(), addresses.end());
    addresses = std::move(others);
  }
  const Address point = keeps ? keep_store(addresses, meeting.port, options.timeout())
                              : find_store(addresses, meeting, place, options.timeout());

  const std::string job = meeting.store_is_hosted ? read_launch_environment().job : "";
  const std::string prefix = concatenate("pacer/", job, '/', number_of_meeting(place), '/');
  const auto store = ask_store(
      place, [&] { return std::make_shared<TcpStore>(point, meeting.port, prefix, options.timeout()); });
  const std::optional<int> keeper = meeting.store_is_hosted ? std::nullopt : std::optional<int>(0);
  std::shared_ptr<Store> records;
  std::shared_ptr<Roster> roster;
  try {
    roster = ask_store(place, [&] {
      // The agents' store is older than this attempt of the launch.
      LaunchAttempt attempt{store, {}};
      if (meeting.store_is_hosted) attempt = enter_attempt(store, meeting.rank, place, options.timeout());
      records = attempt.store;
      return call_roll(records, meeting, place, options.timeout(), keeper, attempt.answer);
    });
  } catch (const CommunicationError&) {
    if (keeps) std::this_thread::sleep_for(kFarewell);
    throw;
  }

  const bool is_one_host = roster->is_one_host();
  const Rendezvous met{roster, place, is_one_host ? kLoopback : address_for_others(options, point),
                       gather_through(records, meeting, place, options.timeout(), roster),
                       [store] { store->limit_calls(kCallLimit); }};
  if (meeting.rank == 0 && (!is_one_host || (keeps && !point.is_loopback))) {
    std::fprintf(stderr,
                 "pacer: rank 0 listens at %s, beyond this host, and connections there are neither encrypted "
                 "nor authenticated; use a private network\n",
                 keeps ? point.text.c_str() : met.address.c_str());
  }
  return met;
}

}  // namespace

Rendezvous meet(const Meeting& meeting, const CommunicatorOptions& options) {
  if (meeting.file.empty()) return meet_at_address(meeting, options);
  return meet_through_file(FileStore::open(meeting.file), meeting, meeting.file, options.timeout());
}

std::string rendezvous_file(const std::string& job) {
  require(!job.empty() && job.find('/') == std::string::npos, "a launch named \"", job,
          "\" cannot meet through a file");
  return private_folder_of_user() + "/" + job;
}

}  // namespace pacer::detail
