#include <pacer/collectives/detail/store_board.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// What LibTorch gets in addition, so that its own deadline comes first where it obeys it.
constexpr std::chrono::milliseconds kGrace{1000};

c10::intrusive_ptr<c10d::TCPStore> make_store(const Address& address, int port, int listener,
                                              std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = timeout;
  options.isServer = listener >= 0;
  if (options.isServer) options.masterListenFd = listener;
  return c10::make_intrusive<c10d::TCPStore>(address.text, options);
}

// Calls f in a thread of its own and waits for it. When the deadline passes the thread is left behind, with
// all it holds, and ends when its call does.
void call_within(std::chrono::milliseconds limit, const std::string& place, std::function<void()> f) {
  struct Call {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_done = false;
    std::exception_ptr failure;
  };
  const auto call = std::make_shared<Call>();
  std::thread([call, f = std::move(f)]() mutable {
    std::exception_ptr failure;
    try {
      f();
    } catch (...) {  // rethrown below
      failure = std::current_exception();
    }
    f = nullptr;
    const std::lock_guard<std::mutex> lock(call->mutex);
    call->failure = failure;
    call->is_done = true;
    call->changed.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(call->mutex);
  if (!call->changed.wait_for(lock, limit, [&] { return call->is_done; })) {
    throw BoardSilent(concatenate("the store at ", place, " has not answered for ", limit.count(), " ms"));
  }
  if (call->failure) std::rethrow_exception(call->failure);
}

// Makes this process the host of a store, one for each address, until it ends: a second listener could not be
// had, and ranks that go on to their next meeting come to this store while rank 0 is still in the last one.
void keep_store(const Address& address, int port, std::chrono::milliseconds timeout) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, c10::intrusive_ptr<c10d::TCPStore>> stores;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto place = std::make_pair(address.text, port);
  if (stores.count(place) == 0) {
    stores.emplace(place, make_store(address, port, listen_at(address, port), timeout));
  }
}

}  // namespace

// One connection, for one call at a time. A call that did not return in time keeps it until it does.
struct StoreBoard::Client {
  std::timed_mutex mutex;
  c10::intrusive_ptr<c10d::TCPStore> store;

  std::unique_lock<std::timed_mutex> lock(std::chrono::milliseconds limit) {
    std::unique_lock<std::timed_mutex> own(mutex, limit);
    if (!own) throw BoardSilent("an earlier call to the store has not returned yet");
    return own;
  }
};

StoreBoard::StoreBoard(const Address& address, int port, bool hosts, std::string prefix,
                       std::chrono::milliseconds timeout)
    : place_(concatenate(address.text, " port ", port)),
      prefix_(std::move(prefix)),
      limit_ms_(timeout.count()) {
  if (hosts) keep_store(address, port, timeout);
  client_ = std::make_shared<Client>();
  call_within(timeout + kGrace, place_, [client = client_, address, port, timeout] {
    client->store = make_store(address, port, -1, timeout);
  });
}

StoreBoard::~StoreBoard() = default;

void StoreBoard::post(const std::string& key, const std::string& text) {
  const std::chrono::milliseconds limit(limit_ms_);
  call_within(limit, place_, [client = client_, name = prefix_ + key, text, limit] {
    const auto lock = client->lock(limit);
    const std::vector<uint8_t> value(text.begin(), text.end());
    client->store->compareSet(name, {}, value);
  });
}

std::optional<std::string> StoreBoard::read(const std::string& key) {
  const auto found = std::make_shared<std::optional<std::string>>();
  const std::chrono::milliseconds limit(limit_ms_);
  call_within(limit, place_, [client = client_, name = prefix_ + key, found, limit] {
    const auto lock = client->lock(limit);
    if (!client->store->check({name})) return;
    const std::vector<uint8_t> value = client->store->get(name);
    found->emplace(value.begin(), value.end());
  });
  return *found;
}

}  // namespace pacer::detail
