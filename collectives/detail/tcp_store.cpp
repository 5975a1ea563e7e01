#include <pacer/collectives/detail/tcp_store.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <pacer/collectives/detail/process_identity.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::TCPStore>;

// What LibTorch gets in addition, so that its own deadline comes first where it obeys it.
constexpr std::chrono::milliseconds kConnectGrace{1000};
// Of a wait at the store, in milliseconds an int; a record ends it long before.
constexpr std::chrono::hours kAwhile{24 * 20};

StorePtr make_store(const Address& address, int port, std::chrono::milliseconds timeout,
                    std::optional<int> listener = std::nullopt) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = timeout;
  options.isServer = listener.has_value();
  options.masterListenFd = listener;
  return c10::make_intrusive<c10d::TCPStore>(address.text, options);
}

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

Address keep_store(const std::vector<Address>& addresses, int port, std::chrono::milliseconds timeout) {
  // A second listener could not be had, and ranks that go on to their next meeting come to this store while
  // rank 0 is still in the last one.
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, StorePtr> stores;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Address& address : addresses) {
    const auto place = std::make_pair(address.text, port);
    if (stores.count(place) != 0) return address;
    const std::optional<int> listener = listen_at(address, port);
    if (!listener) continue;
    stores.emplace(place, make_store(address, port, timeout, listener));
    return address;
  }
  fail_rendezvous(concatenate("rank 0 cannot listen at ", addresses.front().text, " port ", port,
                              ": rank 0 must run on the host of that address"),
                  {0});
}

// A call in a thread of its own, which is left behind, with all it holds, where the call does not return.
class TcpStore::Call {
 public:
  explicit Call(std::function<void()> f) : state_(std::make_shared<State>()) {
    std::thread([state = state_, f = std::move(f)]() mutable {
      std::exception_ptr failure;
      try {
        f();
      } catch (...) {  // rethrown by wait
        failure = std::current_exception();
      }
      f = nullptr;
      const std::lock_guard<std::mutex> lock(state->mutex);
      state->failure = failure;
      state->is_done = true;
      state->changed.notify_all();
    }).detach();
  }

  // Returns false where it has not returned within `limit`.
  bool wait(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (!state_->changed.wait_for(lock, limit, [&] { return state_->is_done; })) return false;
    if (state_->failure) std::rethrow_exception(state_->failure);
    return true;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_done = false;
    std::exception_ptr failure;
  };
  std::shared_ptr<State> state_;
};

// One connection, for one call at a time. A call that did not return in time keeps it until it does.
struct TcpStore::Client {
  std::timed_mutex mutex;
  StorePtr store;
};

TcpStore::TcpStore(Address address, int port, std::string prefix, std::chrono::milliseconds timeout)
    : address_(std::move(address)),
      port_(port),
      prefix_(std::move(prefix)),
      timeout_(timeout),
      limit_ms_((timeout + kConnectGrace).count()),
      client_(std::make_shared<Client>()) {
  ask(1, [address = address_, port, timeout](Client& client) {
    client.store = make_store(address, port, timeout);
  });
  limit_ms_ = timeout.count();
}

TcpStore::~TcpStore() = default;

void TcpStore::ask(int64_t requests, const std::function<void(Client&)>& f) {
  count_requests(requests);
  const std::chrono::milliseconds limit(limit_ms_);
  Call call([client = client_, f, limit] {
    const std::unique_lock<std::timed_mutex> lock(client->mutex, limit);
    if (!lock) throw StoreSilent("an earlier call to the store has not returned yet");
    f(*client);
  });
  if (call.wait(limit)) return;
  throw StoreSilent(concatenate("the store at ", address_.text, " port ", port_, " has not answered for ",
                                limit.count(), " ms"));
}

void TcpStore::append(const std::string& key, const std::string& record) {
  // The store does not confirm that it has appended, but answers in order.
  ask(2, [name = prefix_ + key, bytes = to_bytes(pack({record}))](Client& client) {
    client.store->append(name, bytes);
    client.store->check({name});
  });
}

std::vector<std::string> TcpStore::read(const std::string& key) {
  const auto found = std::make_shared<std::vector<uint8_t>>();
  // A get would wait for a key that is not there. compareSet returns what there is, or, without setting it,
  // what was expected; it also wakes who waits for the key, so that these look again.
  ask(1, [name = prefix_ + key, found](Client& client) {
    static const std::vector<uint8_t> absent{0};  // no packed texts
    *found = client.store->compareSet(name, absent, absent);
    if (*found == absent) found->clear();
  });
  return unpack({found->begin(), found->end()});
}

// A wait that reaches its deadline is two warnings of LibTorch's on standard error. So one wait without a
// deadline serves all calls for its key, on a connection that is there for waits alone.
bool TcpStore::wait_for(const std::string& key, std::chrono::milliseconds limit) {
  if (!waiting_ || awaited_ != key) {
    if (!waiting_client_) {
      count_requests(1);
      waiting_client_ = std::make_shared<Client>();
    }
    count_requests(1);
    awaited_ = key;
    waiting_ = std::make_unique<Call>([client = waiting_client_, address = address_, port = port_,
                                       timeout = timeout_, name = prefix_ + key] {
      const std::lock_guard<std::timed_mutex> lock(client->mutex);
      if (!client->store) client->store = make_store(address, port, timeout);
      client->store->wait({name}, kAwhile);
    });
  }
  if (!waiting_->wait(limit)) return false;
  waiting_.reset();
  return true;
}

}  // namespace pacer::detail
