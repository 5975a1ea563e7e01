// The records of several hosts: a client of c10d's TCPStore, which rank 0 or the launcher's agent keeps. A
// store whose host has stopped would block its clients for ever, so every call here has a deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <pacer/collectives/detail/addresses.h>
#include <pacer/collectives/detail/store.h>

namespace pacer::detail {

// Makes this process hold a store at the first of these addresses that is one of this host, until it
// ends, and returns that address. There is one store for each address, however often it is asked for. Throws
// CommunicationError.
Address keep_store(const std::vector<Address>& addresses, int port, std::chrono::milliseconds timeout);

class TcpStore : public Store {
 public:
  // `prefix` keeps meetings and launches that share a store apart. Throws std::exception where nobody answers
  // in time.
  TcpStore(Address address, int port, std::string prefix, std::chrono::milliseconds timeout);
  ~TcpStore() override;

  void append(const std::string& key, const std::string& record) override;
  std::vector<std::string> read(const std::string& key) override;
  bool wait_for(const std::string& key, std::chrono::milliseconds limit) override;

  // How long a call may take from now on; at first, the timeout.
  void limit_calls(std::chrono::milliseconds limit) { limit_ms_ = limit.count(); }

 private:
  struct Client;
  class Call;

  void ask(int64_t requests, const std::function<void(Client&)>& f);

  const Address address_;
  const int port_;
  const std::string prefix_;
  const std::chrono::milliseconds timeout_;
  std::atomic<int64_t> limit_ms_;
  std::shared_ptr<Client> client_;
  std::shared_ptr<Client> waiting_client_;  // once something was waited for
  std::unique_ptr<Call> waiting_;
  std::string awaited_;  // the key that it waits for
};

}  // namespace pacer::detail
