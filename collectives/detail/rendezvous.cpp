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

std::shared_ptr<RankHealth> exchange_members(const std::shared_ptr<Store>& store,
                                             const RendezvousSettings& settings, const std::string& place,
                                             Milliseconds timeout, std::optional<int> store_host,
                                             const std::function<void()>& look) {
  const ProcessIdentity own = ProcessIdentity::myself(settings.world_size);
  const std::string own_text = own.to_text();
  const auto rank = static_cast<size_t>(settings.rank);
  std::vector<std::optional<ProcessIdentity>> processes(static_cast<size_t>(settings.world_size));
  auto next_look = Clock::now() + kLook;
  const auto read_processes = [&](const StoreAllGather::Texts& texts) {
    if (look) look();
    require(texts[rank] == own_text, "rank ", rank, " of ", processes.size(), " is at ", place,
            " already: two processes have the same rank, or something is left from an earlier run; start "
            "each rank once, and choose another place to meet");
    for (size_t other = 0; other < texts.size(); ++other) {
      if (!texts[other] || processes[other]) continue;
      const std::optional<ProcessIdentity> process = ProcessIdentity::parse(*texts[other]);
      if (!process || process->world_size != own.world_size) {
        fail_rendezvous(
            concatenate("rank ", rank, " counts ", own.world_size, " ranks, but rank ", other, " counts ",
                        process ? std::to_string(process->world_size) : "in another way",
                        "; start all ranks of a run with the same world size and version of pacer"),
            {static_cast<int>(other)});
      }
      processes[other] = process;
    }
    if (Clock::now() < next_look) return;
    require_alive(processes, own, place);
    next_look = Clock::now() + kLook;
  };
  const StoreAllGather exchange{store, kHere,   settings.rank, settings.world_size,
                                place, timeout, read_processes};
  const std::vector<std::string> texts = exchange.run(own_text);
  read_processes({texts.begin(), texts.end()});
  return std::make_shared<RankHealth>(store, settings.rank, std::move(processes), store_host, place);
}

namespace {

Gather gather_through(const std::shared_ptr<Store>& store, const RendezvousSettings& settings,
                      const std::string& place, Milliseconds timeout,
                      const std::shared_ptr<RankHealth>& rank_health) {
  const StoreAllGather exchange{
      store,
      "control",
      settings.rank,
      settings.world_size,
      place,
      timeout,
      [rank_health](const StoreAllGather::Texts&) { rank_health->require_all_alive(); }};
  return [exchange](const std::string& own) { return exchange.run(own); };
}

Rendezvous meet_through_file(const std::shared_ptr<FileStore>& store, const RendezvousSettings& settings,
                             const std::string& place, Milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::shared_ptr<RankHealth> rank_health;
  try {
    rank_health = exchange_members(store, settings, place, timeout, std::nullopt);
  } catch (const CommunicationError&) {
    // The file would stop the next run. But who comes late to a run that failed early shall read there that
    // it did.
    if (Clock::now() >= deadline || has_everybody_come(*store, settings.world_size)) store->remove_name();
    throw;
  }
  // Everybody has the file open.
  if (settings.rank == 0) store->remove_name();
  require(rank_health->is_one_host(), "ranks on several hosts cannot meet through the file ", place,
          "; let them meet at an address");
  return {rank_health, place, kLoopback, gather_through(store, settings, place, timeout, rank_health), [] {}};
}

// Which meeting of this process at this place it is. All ranks count alike, as they meet in the same order.
int number_of_meeting(const std::string& place) {
  static std::mutex mutex;
  static std::map<std::string, int> meetings;
  const std::lock_guard<std::mutex> lock(mutex);
  return ++meetings[place];
}

[[noreturn]] void fail_alone(const RendezvousSettings& settings, const std::string& place,
                             Milliseconds timeout) {
  fail_rendezvous(
      concatenate("nobody answers rank ", settings.rank, " at ", place, " within ", timeout.count(),
                  " ms; start ", settings.store_is_hosted ? "the launcher's agent" : "rank 0",
                  " there, or set a longer timeout"),
      settings.store_is_hosted ? std::vector<int>() : std::vector<int>{0});
}

WaitNotice notice_of(const RendezvousSettings& settings, const std::string& place, Milliseconds timeout) {
  return {settings.rank, place, timeout, /*speaks=*/settings.rank == 1 || settings.local_rank == 0};
}

// A loopback address is of this host alone, and other users of the host can reach it. So the ranks meet
// through a file instead, which stands for the port of this loopback interface.
Rendezvous meet_at_loopback(const RendezvousSettings& settings, const std::string& place,
                            Milliseconds timeout) {
  std::string name = ProcessIdentity::myself(1).network;
  std::replace(name.begin(), name.end(), '/', '-');
  const std::string port = std::to_string(settings.port);
  const std::string path = concatenate(private_folder_of_user(), "/port-", port, '-', name, '-',
                                       number_of_meeting("loopback " + port));
  if (settings.rank == 0) {
    const auto store = FileStore::keep(path);
    if (!store) {
      fail_rendezvous(concatenate("rank 0 cannot keep ", path, ": another rank 0 waits at ", place,
                                  "; choose another port"),
                      {});
    }
    try {
      return meet_through_file(store, settings, place, timeout);
    } catch (const CommunicationError&) {
      std::this_thread::sleep_for(kFarewell);
      store->remove_name();
      throw;
    }
  }
  const auto deadline = Clock::now() + timeout;
  WaitNotice notice = notice_of(settings, place, timeout);
  while (true) {
    if (const auto store = FileStore::open_kept(path)) {
      return meet_through_file(store, settings, place, timeout);
    }
    if (Clock::now() >= deadline) fail_alone(settings, place, timeout);
    notice.look("rank 0", concatenate("start it on this host, with the same MASTER_PORT and the same "
                                      "XDG_RUNTIME_DIR or TMPDIR, because these ranks meet through the file ",
                                      path));
    std::this_thread::sleep_for(Milliseconds(20));
  }
}

// Where ranks of other hosts can reach this one. `store`: where the store is.
std::string address_for_others(const CommunicatorOptions& options, const Address& store) {
  if (options.listen_address()) return resolve(*options.listen_address()).front().text;
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
    fail_rendezvous(concatenate("the store at ", place, " went away while the ranks met (",
                                first_line(error.what()), "); see what rank 0 printed"),
                    {0});
  }
}

// LibTorch's client would look for it as well, but talks a lot where it does not find it, or finds something
// else.
Address find_store(const std::vector<Address>& addresses, const RendezvousSettings& settings,
                   const std::string& place, Milliseconds timeout) {
  WaitNotice notice = notice_of(settings, place, timeout);
  const std::string whom = settings.store_is_hosted ? "the launcher's agent" : "rank 0";
  const auto deadline = Clock::now() + timeout;
  while (true) {
    const auto left =
        std::max(std::chrono::duration_cast<Milliseconds>(deadline - Clock::now()), Milliseconds(0));
    const auto point = wait_for_listener(addresses, settings.port, left, [&] {
      notice.look(whom, concatenate("start ", whom, " there, or correct MASTER_ADDR and MASTER_PORT"));
    });
    if (!point) fail_alone(settings, place, timeout);
    if (is_other_service(*point, settings.port, timeout)) {
      fail_rendezvous(
          concatenate("what listens at ", place, " is not ", whom,
                      " but another service; set MASTER_PORT to a free port, alike on all ranks"));
    }
    // Rank 0 of an earlier run may have ended meanwhile.
    if (wait_for_listener({*point}, settings.port, Milliseconds(0))) return *point;
  }
}

Rendezvous meet_at_address(const RendezvousSettings& settings, const CommunicatorOptions& options) {
  const std::string place = concatenate(settings.host, " port ", settings.port);
  const std::optional<std::string>& listen = options.listen_address();
  require(listen != "0.0.0.0" && listen != "::",
          "listen_address is every address of this host; set it to the one that the other ranks reach");
  std::vector<Address> addresses = resolve(settings.host);
  const bool is_loopback = std::all_of(addresses.begin(), addresses.end(),
                                       [](const Address& address) { return address.is_loopback; });
  if (is_loopback && !listen && !settings.store_is_hosted) {
    require(
        settings.local_size == settings.world_size, settings.host, " is ", addresses.front().text,
        " for rank ", settings.rank,
        ", which other hosts cannot reach; set MASTER_ADDR to an address that they can, or listen_address");
    return meet_at_loopback(settings, place, options.timeout());
  }

  const bool keeps = settings.rank == 0 && !settings.store_is_hosted;
  if (listen && !settings.store_is_hosted && (keeps || is_loopback)) {
    // The name of a host is often a loopback address there; its ranks then find rank 0 where it listens.
    std::vector<Address> others = resolve(*listen);
    if (!keeps) others.insert(others.end(), addresses.begin(), addresses.end());
    addresses = std::move(others);
  }
  const Address point = keeps ? keep_store(addresses, settings.port, options.timeout())
                              : find_store(addresses, settings, place, options.timeout());

  const std::string job = settings.store_is_hosted ? read_launch_environment().job : "";
  const std::string prefix = concatenate("pacer/", job, '/', number_of_meeting(place), '/');
  const auto store = ask_store(
      place, [&] { return std::make_shared<TcpStore>(point, settings.port, prefix, options.timeout()); });
  const std::optional<int> store_host = settings.store_is_hosted ? std::nullopt : std::optional<int>(0);
  std::shared_ptr<Store> records;
  std::shared_ptr<RankHealth> rank_health;
  try {
    rank_health = ask_store(place, [&] {
      // The agents' store is older than this attempt of the launch.
      LaunchAttempt attempt{store, {}};
      if (settings.store_is_hosted) attempt = enter_attempt(store, settings.rank, place, options.timeout());
      records = attempt.store;
      return exchange_members(records, settings, place, options.timeout(), store_host, attempt.answer);
    });
  } catch (const CommunicationError&) {
    if (keeps) std::this_thread::sleep_for(kFarewell);
    throw;
  }

  const bool is_one_host = rank_health->is_one_host();
  const Rendezvous met{rank_health, place, is_one_host ? kLoopback : address_for_others(options, point),
                       gather_through(records, settings, place, options.timeout(), rank_health),
                       [store] { store->limit_calls(kCallLimit); }};
  if (settings.rank == 0 && (!is_one_host || (keeps && !point.is_loopback))) {
    std::fprintf(stderr,
                 "pacer: rank 0 listens at %s, beyond this host, and connections there are neither encrypted "
                 "nor authenticated; use a private network\n",
                 keeps ? point.text.c_str() : met.address.c_str());
  }
  return met;
}

}  // namespace

Rendezvous rendezvous(const RendezvousSettings& settings, const CommunicatorOptions& options) {
  if (settings.file.empty()) return meet_at_address(settings, options);
  return meet_through_file(FileStore::open(settings.file), settings, settings.file, options.timeout());
}

std::string rendezvous_file(const std::string& job) {
  require(!job.empty() && job.find('/') == std::string::npos, "a launch named \"", job,
          "\" cannot meet through a file");
  return private_folder_of_user() + "/" + job;
}

}  // namespace pacer::detail
